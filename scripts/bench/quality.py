"""Held-out loss of methods at equal tokens, and the bytes that each sends, over several seeds.

    python -m scripts.bench.quality [--rows diloco,int4] [--seeds 0,1,2] [--out FOLDER] [section.key=value ...]

Every row trains the quickstart's model on the same number of tokens of its text (4 islands x 200 inner steps x 1024
tokens, or one island with steps four times as large), with all islands in one process. Results are appended to
FOLDER/results.jsonl, and runs found there are not repeated. `--plot FILE.png` draws held-out loss against bytes and
against tokens for the rows in HEAD_TO_HEAD.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from scripts.bench.arguments import PLAIN, choices, whole_numbers
from scripts.bench.results import Results
from scripts.bench.simulation import run_simulation

EVALUATE = ["evaluate.every_rounds=4", "evaluate.tokens=16384"]
SMALL = ["optimizer.tokens_per_step=1024", "island.micro_batch=4", *EVALUATE]
ONE = ["optimizer.tokens_per_step=4096", "outer.start_islands=1", *EVALUATE]


@dataclass(frozen=True)
class Variant:
    """A method: a config of configs/methods with changes."""

    config: str
    changes: tuple[str, ...] = ()
    islands: int = 4


@dataclass(frozen=True)
class LossResult:
    """The result of one run."""

    row: str
    settings: str
    """Config, islands and overrides, as on the command line of `diloco simulate`."""
    loss: float | None
    sent_bytes: float
    """Mean over the islands."""
    tokens: int
    losses: list[tuple[float, float]]
    """(share of the run, held-out loss at that point)."""


FEEDBACK = "outer.coding.feedback=0.9"
HEAD_TO_HEAD = {
    "plain averaging, bf16": ("bf16", "bf16-rare"),
    "plain averaging, int4": ("int4", "int4-rare"),
    "streaming, int4": ("streaming-int4",),
    "SparseLoCo": ("sparseloco", "sparseloco-often"),
    "MuLoCo, 2 bits": ("muloco", "muloco-often"),
}
"""Lines of the plot: variants of one method with different round lengths, to compare methods at equal bytes."""
EACH_STEP = ("outer.inner_steps=1", "outer.rounds=200", "evaluate.every_rounds=40")
ROWS = {
    "data-parallel": Variant("snoo", (*EACH_STEP, PLAIN), 1),
    "data-parallel-muon": Variant("snoo", (*EACH_STEP, PLAIN, "optimizer.name=muon"), 1),
    "snoo": Variant("snoo", (), 1),
    "muloco-one": Variant("snoo", ("outer.optimizer={lr: 0.7, momentum: 0.6}", "optimizer.name=muon"), 1),
    "fp32": Variant("fedavg"),
    "bf16": Variant("fedavg", ("outer.codec=bf16",)),
    "int4": Variant("fedavg", ("outer.codec=int4",)),
    "e3m0": Variant("fedavg", ("outer.codec=e3m0",)),
    "2-bits": Variant("fedavg", ("outer.codec=stat2",)),
    "2-bits-feedback": Variant("fedavg", ("outer.codec=stat2", FEEDBACK)),
    "diloco": Variant("diloco"),
    "streaming": Variant("streaming-diloco", (PLAIN,)),
    "streaming-late": Variant("streaming-diloco", (PLAIN, "outer.fragments=2", "outer.delay=5")),
    "streaming-mixed": Variant("streaming-diloco", (PLAIN, "outer.delay=2", "outer.mix=0.5")),
    "streaming-int4": Variant("streaming-diloco", (PLAIN, "outer.codec=int4")),
    "eager": Variant("eager-updates", (PLAIN,)),
    "sparseloco": Variant("sparseloco"),
    "sparseloco-mean": Variant("sparseloco", ("outer.merge.rule=mean",)),
    "muloco": Variant("muloco", (PLAIN,)),
    "lowrank": Variant("powersgd", (PLAIN,)),
    "bf16-rare": Variant("fedavg", ("outer.codec=bf16", "outer.inner_steps=40", "outer.rounds=5")),
    "int4-rare": Variant("fedavg", ("outer.codec=int4", "outer.inner_steps=40", "outer.rounds=5")),
    "muloco-often": Variant("muloco", (PLAIN, "outer.inner_steps=5", "outer.rounds=40", "evaluate.every_rounds=8")),
    "sparseloco-often": Variant("sparseloco", EACH_STEP),
    "des-loc": Variant("des-loc"),
    "local-adam": Variant("local-adam"),
    "noloco": Variant("noloco"),
}


def main() -> None:
    """Run what is missing and print the table."""
    args = _arguments()
    results = Results(args.out, LossResult)
    wanted = {
        shlex.join(build_settings(ROWS[name], seed, args.overrides)): name for seed in args.seeds for name in args.rows
    }
    finished = {result.settings for result in results.read()}
    for settings, name in wanted.items():
        if settings not in finished and (result := train(name, settings)):
            results.add(result)
            print(f"{name}: {result.loss}: {settings}", file=sys.stderr, flush=True)
    found = [result for result in results.read() if result.settings in wanted]
    print_table(found)
    if args.plot is not None:
        draw_plot(found, args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=choices(tuple(ROWS)), default=list(ROWS), help="comma-separated")
    parser.add_argument("--seeds", type=whole_numbers, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="folder of results.jsonl")
    parser.add_argument("--plot", type=Path, help="PNG file for the plot of loss against bytes")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides for every row")
    return parser.parse_args()


def build_settings(row: Variant, seed: int, overrides: list[str]) -> list[str]:
    """Build the arguments of `diloco simulate` for one run: config, islands and overrides."""
    size = ONE if row.islands == 1 else SMALL
    config = f"configs/methods/{row.config}.yaml"
    return [config, "--islands", str(row.islands), f"seed={seed}", *size, *row.changes, *overrides]


def train(name: str, settings: str) -> LossResult | None:
    """Train one run. The loss is None when it diverged. Returns None when it failed."""
    summary = run_simulation(["--in-process", "--ranks", "1", *shlex.split(settings)])
    if summary is None:
        return None
    sent = list(summary["bytes_sent"].values())
    by_round = {int(number): loss for number, loss in summary["eval_losses"].items()}
    losses = [(number / max(by_round), loss) for number, loss in by_round.items()]
    return LossResult(name, settings, summary["final_eval_loss"], mean(sent), summary["tokens"], losses)


def print_table(results: list[LossResult]) -> None:
    """Print the mean loss, its spread and the bytes of each row."""
    print(f"{'row':<30}{'seeds':>6}{'loss':>9}{'spread':>8}{'against fp32':>14}{'MB an island':>14}")
    plain = [r.loss for r in results if r.row == "fp32" and r.loss is not None]
    for name in ROWS:
        runs = [r for r in results if r.row == name]
        if all(r.loss is None for r in runs):
            continue
        middle, spread = mean_and_spread(runs)
        against = f"{100 * (middle / mean(plain) - 1):+.2f} %" if plain else ""
        sent = mean(r.sent_bytes for r in runs) / 1e6
        print(f"{name:<30}{len(runs):>6}{middle:>9.4f}{spread:>8.4f}{against:>14}{sent:>14.2f}")


def draw_plot(results: list[LossResult], path: Path) -> None:
    """Plot the final loss against bytes and the loss against tokens for HEAD_TO_HEAD, averaged over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_bytes, by_tokens) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for label, rows in HEAD_TO_HEAD.items():
        found = [runs for row in rows if (runs := [r for r in results if r.row == row and r.loss is not None])]
        if not found:
            continue
        ends = sorted((mean(r.sent_bytes for r in runs) / 1e6, *mean_and_spread(runs)) for runs in found)
        by_bytes.errorbar(*zip(*ends, strict=True), fmt="o-", capsize=3, label=label)
        shares, losses = mean_curve(found[0])
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


def mean_and_spread(runs: list[LossResult]) -> tuple[float, float]:
    """Mean and standard deviation of the final losses."""
    losses = [run.loss for run in runs if run.loss is not None]
    return mean(losses), stdev(losses) if len(losses) > 1 else 0.0


def mean_curve(runs: list[LossResult]) -> tuple[list[float], list[float]]:
    """Shares of the run, without its start, and the mean loss at each."""
    curves = [dict(run.losses) for run in runs]
    shares = sorted(set.intersection(*(set(curve) for curve in curves)) - {0.0})
    return shares, [mean(curve[share] for curve in curves) for share in shares]


if __name__ == "__main__":
    main()
