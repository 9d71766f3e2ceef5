"""Wall clock to a fixed held-out loss on slow links: data-parallel training, rare averaging, and
few bits.

    python -m scripts.bench.wallclock.wallclock [--rows data-parallel,averaging] [--seeds 0,1]
        [--loss 2.35]
        [--plot FILE.png]
    python -m scripts.bench.wallclock.wallclock --torchft-python PATH --seeds 0,1,2,3,4 \\
        --rows
        data-parallel,torchft,torchft-streaming,averaging,averaging-int4,streaming-fp32,streaming

Four machines, each a network namespace with a link of its own (needs root), train the quickstart's
model on its text: either data-parallel, with gradients that gloo all-reduces over the links in
every step, or as four islands of one rank. The rivals are torch's DistributedDataParallel and,
where --torchft-python has it, torchft's DiLoCo; their loop is wallclock_machine.py. All rows train
on 4 x 1024 tokens per step with the same seed, learning rates and held-out text, and are evaluated
after the same steps. Islands and ranks share this machine's cores for all of their work. The clock
runs from the first inner step and counts everything after it.

A loss is reached where the line between two measurements crosses it. The rows share a schedule, so
the lowest loss that all of them reach is the final loss of the method that is slowest per token.

Results are appended to FOLDER/results.jsonl, and runs found there are not repeated.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scripts.bench.arguments import (
    PLAIN,
    add_torchft_python,
    choices,
    require_torchft,
    whole_numbers,
)
from scripts.bench.results import Results
from scripts.bench.wallclock.wallclock_runs import (
    WallclockResult,
    WallclockRun,
    run_data_parallel,
    run_islands,
    run_rival,
    seconds_to,
)

SHARED = (
    "optimizer.tokens_per_step=1024",
    "island.micro_batch=4",
    "island.checkpoint.every_rounds=null",
    "evaluate.tokens=8192",
)
"""Overrides of every row: an island's share of a step, and how held-out loss is measured."""
DATA_PARALLEL = "data-parallel"
TORCHFT = "torchft"
STEPS = 10
"""Inner steps in one unit of --rounds. Held-out loss is measured after every second unit."""


@dataclass(frozen=True)
class Method:
    """A training method: a config of configs/methods with changes."""

    label: str
    config: str
    changes: tuple[str, ...] = ()
    inner_steps: int = STEPS
    """Inner steps from one average of a parameter to the next; a divisor of STEPS."""
    is_data_parallel: bool = False
    rival: str = ""
    """The kind of rival in wallclock_machine.py; "" for our own training."""


ROWS = {
    # Of the config, it uses only the model, the text, the inner optimizer and the number of steps.
    DATA_PARALLEL: Method(
        "data-parallel, AdamW, torch's DDP", "fedavg", is_data_parallel=True, rival="ddp"
    ),
    "data-parallel-ours": Method(
        "data-parallel, AdamW, our trainer", "fedavg", is_data_parallel=True
    ),
    "data-parallel-muon": Method(
        "data-parallel, Muon, our trainer", "muloco", is_data_parallel=True
    ),
    TORCHFT: Method("torchft, plain averaging every 10 steps, fp32", "fedavg", rival="torchft"),
    "torchft-streaming": Method(
        "torchft streaming, plain averaging, 5 fragments, delay 1, fp32",
        "streaming-diloco",
        (PLAIN,),
        rival="torchft-streaming",
    ),
    "averaging": Method("plain averaging every 10 steps, fp32", "fedavg"),
    "averaging-int4": Method(
        "plain averaging every 10 steps, int4", "fedavg", ("outer.codec=int4",)
    ),
    "streaming-fp32": Method(
        "streaming, plain averaging, 5 fragments, delay 1, fp32",
        "streaming-diloco",
        (PLAIN, "outer.codec=fp32"),
    ),
    "streaming": Method(
        "streaming, plain averaging, 5 fragments, delay 1, int4",
        "streaming-diloco",
        (PLAIN, "outer.codec=int4"),
    ),
    "diloco": Method("DiLoCo, Nesterov 0.7 / 0.9, bf16", "diloco"),
    "int4": Method("plain averaging every 5 steps, int4", "fedavg", ("outer.codec=int4",), 5),
    "int4-often": Method("plain averaging every 2 steps, int4", "fedavg", ("outer.codec=int4",), 2),
    "muloco": Method(
        "MuLoCo, plain averaging every 10 steps, 2 bits with feedback", "muloco", (PLAIN,)
    ),
    "sparseloco": Method("SparseLoCo, 64 of 4096 elements in 2 bits", "sparseloco"),
}
DEFAULT_ROWS = [DATA_PARALLEL, "data-parallel-muon", "averaging", "muloco"]


def main() -> None:
    """Run what is missing and print the table."""
    args = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, lambda *_: sys.exit("stopped; every process and namespace has been removed")
        )
    started_at = time.monotonic()
    results = Results(args.out, WallclockResult)
    wanted = [build_run(name, seed, args) for seed in args.seeds for name in args.rows]
    finished = {(result.row, result.settings) for result in results.read()}
    for run in wanted:
        if (run.row, run.settings) in finished:
            continue
        result = make_run(run, args.torchft_python)
        if result is None:
            sys.exit(f"{run.row} failed with seed {run.seed}; its last lines are above")
        results.add(result)
        finished.add((run.row, run.settings))
        summary = f"{result.curve[-1][0]:.0f} s, held-out loss {result.curve[-1][1]:.4f}"
        print(f"{run.row}, seed {run.seed}: {summary}", file=sys.stderr, flush=True)
    settings = {(run.row, run.settings) for run in wanted}
    found = [result for result in results.read() if (result.row, result.settings) in settings]
    print_table(found, args)
    print(
        f"{time.monotonic() - started_at:.0f} s in all, on {os.cpu_count()} cores that the "
        "machines share"
    )
    if args.plot is not None:
        draw_plot(found, args)


def make_run(run: WallclockRun, torchft_python: str) -> WallclockResult | None:
    """Make one run. On failure, print the last lines to stderr and return None."""
    if run.rival:
        return run_rival(run, torchft_python if run.rival.startswith(TORCHFT) else sys.executable)
    return run_data_parallel(run) if ROWS[run.row].is_data_parallel else run_islands(run)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_rows = ",".join(DEFAULT_ROWS)
    rows = f"comma-separated, of {', '.join(ROWS)}; default: {default_rows}"
    parser.add_argument("--rows", type=choices(tuple(ROWS)), default=DEFAULT_ROWS, help=rows)
    seeds = "comma-separated; default: 0"
    parser.add_argument("--seeds", type=whole_numbers, default=[0], help=seeds)
    parser.add_argument(
        "--loss",
        type=float,
        default=2.35,
        help="held-out loss to reach, nats per token; default: 2.35",
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help=f"units of {STEPS} inner steps; default: 20"
    )
    parser.add_argument(
        "--link",
        default="100mbit",
        help="link of each machine, as in `diloco simulate --link`; default: 100mbit",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/wallclock"), help="FOLDER; default: runs/wallclock"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="plot of held-out loss against seconds"
    )
    add_torchft_python(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="overrides for every row"
    )
    args = parser.parse_args()
    if any(ROWS[name].rival.startswith(TORCHFT) for name in args.rows):
        require_torchft(parser, args.torchft_python)
    return args


def build_run(name: str, seed: int, args: argparse.Namespace) -> WallclockRun:
    """Build the run of a row with one seed."""
    row = ROWS[name]
    often = STEPS // row.inner_steps
    size = f"outer.inner_steps={row.inner_steps}", f"outer.rounds={args.rounds * often}"
    changes = (
        f"seed={seed}",
        *size,
        f"evaluate.every_rounds={2 * often}",
        *SHARED,
        *row.changes,
        *args.overrides,
    )
    return WallclockRun(
        name, seed, args.link, (f"configs/methods/{row.config}.yaml", *changes), row.rival
    )


# -- table -----------------------------------------------------------------------------------------


def print_table(results: Sequence[WallclockResult], args: argparse.Namespace) -> None:
    """Print a line for each row, with medians over the seeds."""
    compute = min(
        (r.step_seconds for r in results if not ROWS[r.row].is_data_parallel), default=None
    )
    rivals = [
        median_seconds([r for r in results if r.row == name], args.loss)
        for name in (DATA_PARALLEL, TORCHFT)
    ]
    columns = (
        f"{'x DDP':>8}{'x torchft':>10}{'last loss':>11}{'step s':>8}{'network':>9}{'MB sent':>9}"
    )
    print(f"{'':<47}{f's to {args.loss:g}':>11}{columns}")
    for name in args.rows:
        found = [result for result in results if result.row == name]
        ours = median_seconds(found, args.loss)
        ratios = [f"{theirs / ours:.2f}" if ours and theirs else "-" for theirs in rivals]
        shares = [share for r in found if (share := network_share(r, compute)) is not None]
        reached = "never" if ours is None else f"{ours:.1f}"
        loss = median(r.curve[-1][1] for r in found)
        step_seconds = median(r.step_seconds for r in found)
        share = f"{median(shares):.0%}" if shares else "-"
        sent_megabytes = median(r.sent_bytes for r in found) / 1e6
        print(
            f"{ROWS[name].label:<47}{reached:>11}{ratios[0]:>8}{ratios[1]:>10}"
            f"{loss:>11.4f}{step_seconds:>8.3f}{share:>9}{sent_megabytes:>9.1f}"
        )
        for result in found if len(found) > 1 else []:
            seconds = seconds_to(result.curve, args.loss)
            print(f"    {'never' if seconds is None else f'{seconds:.1f} s'}: seed {result.seed}")
    print("x DDP, x torchft: how many times faster than these rows the loss is reached")
    print(
        "network: share of the run's time that was neither compute nor evaluation; MB sent: by a "
        "machine in the whole"
    )
    print(f"run, on the wire. Load before each run: {' '.join(f'{r.load:.1f}' for r in results)}")


def median_seconds(results: Sequence[WallclockResult], loss: float) -> float | None:
    """Return the median seconds to the loss. None if there are no runs or one never reaches it."""
    seconds = [seconds_to(result.curve, loss) for result in results]
    reached = [s for s in seconds if s is not None]
    return median(reached) if reached and len(reached) == len(seconds) else None


def network_share(result: WallclockResult, compute: float | None) -> float | None:
    """Return the share of the run's time that the network cost.

    It is the time in which islands were stalled, or that data-parallel steps took beyond `compute`:
    the seconds of the islands' steps, which do the same work without the all-reduce. None if
    unknown.
    """
    if not ROWS[result.row].is_data_parallel:
        return result.stalled_seconds / result.curve[-1][0]
    if compute is None:
        return None
    return max(result.step_seconds - compute, 0.0) * result.num_steps / result.curve[-1][0]


# -- plot ------------------------------------------------------------------------------------------


def draw_plot(results: Sequence[WallclockResult], args: argparse.Namespace) -> None:
    """Plot held-out loss against seconds, one line per run, with a mark where it reaches the
    loss.
    """
    from diloco.report.style import INK, ISLAND_COLORS, REFERENCE, new_axes, plot_style, save

    others = [name for name in args.rows if name != DATA_PARALLEL]
    colors = {DATA_PARALLEL: REFERENCE} | dict(zip(others, ISLAND_COLORS, strict=False))
    with plot_style():
        title = f"Held-out loss against wall clock: 4 machines on {args.link} links"
        figure, axes = new_axes(title, "seconds since the first inner step", "loss, nats per token")
        axes.axhline(args.loss, color=INK, linestyle=":", linewidth=1.2)
        for name in args.rows:
            found = [result for result in results if result.row == name]
            seconds = median_seconds(found, args.loss)
            label = f"{ROWS[name].label}: {'never' if seconds is None else f'{seconds:.0f} s'}"
            for result in found:
                axes.plot(
                    *zip(*result.curve, strict=True), color=colors[name], linewidth=2.2, label=label
                )
                label = "_another seed"
                if (at := seconds_to(result.curve, args.loss)) is not None:
                    axes.plot(
                        [at],
                        [args.loss],
                        marker="o",
                        markersize=8,
                        color=colors[name],
                        clip_on=False,
                    )
        axes.set_xlim(left=0)
        axes.legend(
            title=f"wall clock to a loss of {args.loss:g} (dotted)",
            loc="upper right",
            alignment="left",
        )
        save(figure, args.plot)


if __name__ == "__main__":
    main()
