"""Held-out loss of methods at equal tokens, and the bytes that each sent, over several seeds; in one process each.

    python -m scripts.bench.quality [--rows diloco,int4] [--seeds 0,1,2] [--out FOLDER] [section.key=value ...]

Every row trains the quickstart's model and text on as many tokens (4 islands x 200 inner steps x 1024 tokens, or one
island with steps four times as large). Results go to FOLDER/results.jsonl as they come, and runs that are in there are
not repeated; `--plot FILE.png` draws held-out loss against bytes and against tokens, of the rows in HEAD_TO_HEAD.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from scripts.bench.arguments import PLAIN, choices, whole_numbers
from scripts.bench.results import Results
from scripts.bench.simulation import simulated

EVALUATE = ["evaluate.every_rounds=4", "evaluate.tokens=16384"]
SMALL = ["optimizer.tokens_per_step=1024", "island.micro_batch=4", *EVALUATE]
ONE = ["optimizer.tokens_per_step=4096", "outer.start_islands=1", *EVALUATE]


@dataclass(frozen=True)
class Row:
    """A method: a config of configs/methods and what is changed in it."""

    config: str
    changes: tuple[str, ...] = ()
    islands: int = 4


@dataclass(frozen=True)
class Result:
    """One run."""

    row: str
    settings: str
    """Config, islands and overrides, as on the command line of `diloco simulate`."""
    loss: float | None
    sent_bytes: float
    """By an island, on average."""
    tokens: int
    losses: list[tuple[float, float]]
    """Share of the run, and held-out loss there."""


FEEDBACK = "outer.coding.feedback=0.9"
HEAD_TO_HEAD = {
    "DiLoCo, bf16": ("bf16", "bf16-rare"),
    "DiLoCo, int4": ("int4", "int4-rare"),
    "Streaming DiLoCo, int4": ("streaming-int4",),
    "SparseLoCo": ("sparseloco", "sparseloco-often"),
    "MuLoCo, 2 bits": ("muloco", "muloco-often"),
}
"""In the plot: the same method with rounds more or less often, so that all can be compared at equal bytes."""
EACH_STEP = ("outer.inner_steps=1", "outer.rounds=200", "evaluate.every_rounds=40")
ROWS = {
    "data-parallel": Row("snoo", (*EACH_STEP, PLAIN), 1),
    "data-parallel-muon": Row("snoo", (*EACH_STEP, PLAIN, "optimizer.name=muon"), 1),
    "snoo": Row("snoo", (), 1),
    "muloco-one": Row("snoo", ("outer.optimizer={lr: 0.7, momentum: 0.6}", "optimizer.name=muon"), 1),
    "fp32": Row("fedavg"),
    "bf16": Row("fedavg", ("outer.codec=bf16",)),
    "int4": Row("fedavg", ("outer.codec=int4",)),
    "e3m0": Row("fedavg", ("outer.codec=e3m0",)),
    "2-bits": Row("fedavg", ("outer.codec=stat2",)),
    "2-bits-feedback": Row("fedavg", ("outer.codec=stat2", FEEDBACK)),
    "nesterov": Row("diloco"),
    "streaming": Row("streaming-diloco", (PLAIN,)),
    "streaming-late": Row("streaming-diloco", (PLAIN, "outer.fragments=2", "outer.delay=5")),
    "streaming-mixed": Row("streaming-diloco", (PLAIN, "outer.delay=2", "outer.mix=0.5")),
    "streaming-int4": Row("streaming-diloco", (PLAIN, "outer.codec=int4")),
    "eager": Row("eager-updates", (PLAIN,)),
    "sparseloco": Row("sparseloco"),
    "sparseloco-mean": Row("sparseloco", ("outer.merge.rule=mean",)),
    "muloco": Row("muloco", (PLAIN,)),
    "lowrank": Row("powersgd", (PLAIN,)),
    "bf16-rare": Row("fedavg", ("outer.codec=bf16", "outer.inner_steps=40", "outer.rounds=5")),
    "int4-rare": Row("fedavg", ("outer.codec=int4", "outer.inner_steps=40", "outer.rounds=5")),
    "muloco-often": Row("muloco", (PLAIN, "outer.inner_steps=5", "outer.rounds=40", "evaluate.every_rounds=8")),
    "sparseloco-often": Row("sparseloco", EACH_STEP),
    "des-loc": Row("des-loc"),
    "local-adam": Row("local-adam"),
    "noloco": Row("noloco"),
}


def main() -> None:
    """Run what is missing, and print the table."""
    args = _arguments()
    kept = Results(args.out, Result)
    wanted = {
        shlex.join(settings_of(ROWS[name], seed, args.overrides)): name for seed in args.seeds for name in args.rows
    }
    for settings, name in wanted.items():
        if all(r.settings != settings for r in kept.read()) and (result := train(name, settings)):
            kept.add(result)
            print(f"{name}: {result.loss}: {settings}", file=sys.stderr, flush=True)
    found = [result for result in kept.read() if result.settings in wanted]
    print_table(found)
    if args.plot is not None:
        draw(found, args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=choices(tuple(ROWS)), default=list(ROWS), help="with commas between")
    parser.add_argument("--seeds", type=whole_numbers, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="folder of results.jsonl")
    parser.add_argument("--plot", type=Path, help="a PNG: loss against bytes")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every row")
    return parser.parse_args()


def settings_of(row: Row, seed: int, overrides: list[str]) -> list[str]:
    """Config, islands and overrides of a run, as on the command line of `diloco simulate`."""
    size = ONE if row.islands == 1 else SMALL
    config = f"configs/methods/{row.config}.yaml"
    return [config, "--islands", str(row.islands), f"seed={seed}", *size, *row.changes, *overrides]


def train(name: str, settings: str) -> Result | None:
    """A run of its own; its loss is None when it diverged. None when it failed."""
    summary = simulated(["--in-process", "--ranks", "1", *shlex.split(settings)])
    if summary is None:
        return None
    sent = list(summary["bytes_sent"].values())
    by_round = {int(number): loss for number, loss in summary["eval_losses"].items()}
    losses = [(number / max(by_round), loss) for number, loss in by_round.items()]
    return Result(name, settings, summary["final_eval_loss"], mean(sent), summary["tokens"], losses)


def print_table(results: list[Result]) -> None:
    """Mean and spread of each row, and its bytes."""
    print(f"{'row':<30}{'seeds':>6}{'loss':>9}{'spread':>8}{'against fp32':>14}{'MB an island':>14}")
    plain = [r.loss for r in results if r.row == "fp32" and r.loss is not None]
    for name in ROWS:
        runs = [r for r in results if r.row == name]
        if all(r.loss is None for r in runs):
            continue
        middle, spread = spread_of(runs)
        against = f"{100 * (middle / mean(plain) - 1):+.2f} %" if plain else ""
        sent = mean(r.sent_bytes for r in runs) / 1e6
        print(f"{name:<30}{len(runs):>6}{middle:>9.4f}{spread:>8.4f}{against:>14}{sent:>14.2f}")


def draw(results: list[Result], path: Path) -> None:
    """Held-out loss at the end against bytes, and on the way against tokens, of HEAD_TO_HEAD; mean over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_bytes, by_tokens) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for label, rows in HEAD_TO_HEAD.items():
        found = [runs for row in rows if (runs := [r for r in results if r.row == row and r.loss is not None])]
        if not found:
            continue
        ends = sorted((mean(r.sent_bytes for r in runs) / 1e6, *spread_of(runs)) for runs in found)
        by_bytes.errorbar(*zip(*ends, strict=True), fmt="o-", capsize=3, label=label)
        shares, losses = curve_of(found[0])
        by_tokens.plot([share * found[0][0].tokens / 1e3 for share in shares], losses, ".-", label=label)
    by_bytes.set(xscale="log", xlabel="MB sent by an island in the whole run", ylabel="held-out loss, nats a token")
    by_bytes.set_title("at the end: rounds more or less often", fontsize=10)
    by_bytes.set_xticks(ticks := [1, 2, 5, 10, 20, 50, 100], [str(tick) for tick in ticks])
    by_bytes.minorticks_off()
    by_tokens.set(xlabel="thousand tokens, of all islands")
    by_tokens.set_title("on the way: rounds of every 10 inner steps", fontsize=10)
    by_tokens.legend(fontsize=8)
    for axes in (by_bytes, by_tokens):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def spread_of(runs: list[Result]) -> tuple[float, float]:
    """Mean and standard deviation of the losses at the end."""
    losses = [run.loss for run in runs if run.loss is not None]
    return mean(losses), stdev(losses) if len(losses) > 1 else 0.0


def curve_of(runs: list[Result]) -> tuple[list[float], list[float]]:
    """Shares of the run, after the beginning, and the mean loss at each."""
    curves = [dict(run.losses) for run in runs]
    shares = sorted(set.intersection(*(set(curve) for curve in curves)) - {0.0})
    return shares, [mean(curve[share] for curve in curves) for share in shares]


if __name__ == "__main__":
    main()
