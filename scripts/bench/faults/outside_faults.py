"""Random faults from outside on running islands: hangs, exits, splits, and the cost of each fault.

    python -m scripts.bench.faults.outside_faults [--faults 200] [--a-run 20]
        [--transports gloo,tls,hivemind]
        [--seed 0] [--folder runs/outside-faults] [--not-apart] [--table]

Each run has a bootstrap process and four islands under the launcher of `diloco launch`, three of
one rank and one of two. Each is in a network namespace, with a disk and a /dev/shm of its own. This
needs root; without it there are no cuts and no shortages of disk or /dev/shm.

At random times an island is killed, or one of its ranks, or its libp2p daemon; an island or one of
its processes is stopped for some seconds; an island is sent SIGTERM, or cut off; for some seconds
an island gets no more memory, file descriptors, threads, or room on its disk or in /dev/shm; or the
bootstrap process is killed. Killed processes come back, as after a machine's restart. At least half
of the islands are well at any time, and the next fault waits for a commit after the last one.

  first     seconds from the fault to the next round that a healthy island commits; it may have been
            under way
  second    seconds to the round after that, which began after the fault
  back      seconds from the end of the fault (the restart, or the waking) to the island's next
            committed round
  T         outer.agreement.running.limits.commit_bound by the healthy islands' measurements at the
            time of the fault

A run is one line of FOLDER/results.jsonl. Runs in that file are not made again, so the command can
be stopped and repeated. It exits with status 1 if anything hung, exited, split, was trained twice
or was left behind.
"""

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.arguments import choices
from scripts.bench.results import Results
from tests.faults.leftovers import watch_leftovers
from tests.faults.outside import WEIGHTS, OutsideSettings, Strike
from tests.faults.outside_runner import run_outside_faults

TRANSPORTS = ("gloo", "tls", "hivemind")


def main() -> None:
    """Make the runs that are missing, one network after the other, and print the table."""
    args = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = Results(args.folder, Run)
    num_runs = -(-args.faults // (len(args.transports) * args.a_run))
    for transport in () if args.table else args.transports:
        for seed in range(args.seed, args.seed + num_runs):
            if not any((run.transport, run.seed) == (transport, seed) for run in results.read()):
                run = make_run(
                    OutsideSettings(transport, args.a_run, seed, is_apart=args.apart), args.folder
                )
                results.add(run)
                print(
                    f"{transport} seed {seed}: {run.outcome['seconds']:.0f} s; "
                    f"{run.problems or 'well'}",
                    flush=True,
                )
    runs = results.read()
    print_table(runs)
    sys.exit(any(run.problems for run in runs))


@dataclass(frozen=True)
class Run:
    """A completed run. `outcome` has the fields of tests.faults.outside.Outcome."""

    transport: str
    seed: int
    outcome: dict[str, Any]
    left: list[str]

    @property
    def strikes(self) -> list[Strike]:
        return [Strike(**strike) for strike in self.outcome["strikes"]]

    @property
    def counts(self) -> dict[str, int]:
        """The number of events of each kind that must not happen."""
        found = self.outcome
        account = self.outcome["account"]
        return {
            "hangs": len(found["hangs"]),
            "exits of healthy islands": len(found["exits"]),
            "permanent splits": len(found["splits"]),
            "runs given up": len(found["failures"]),
            "units trained twice": account["repeated"] or 0,
            "units lost": max(0, account["unrecorded"] - account["may_be_unrecorded"]),
            "left behind": len(self.left),
        }

    @property
    def problems(self) -> str:
        return ", ".join(f"{what}: {number}" for what, number in self.counts.items() if number)


def make_run(settings: OutsideSettings, folder: Path) -> Run:
    """Make one run. Its folder is kept only if something went wrong."""
    place = folder / f"{settings.transport}-{settings.seed}"
    shutil.rmtree(place, ignore_errors=True)
    with watch_leftovers() as leftovers:
        outcome = run_outside_faults(settings, place)
    run = Run(settings.transport, settings.seed, asdict(outcome), leftovers.found)
    if not run.problems:
        shutil.rmtree(place)
    return run


def print_table(runs: Sequence[Run]) -> None:
    """Print the times by network and kind of fault, and the counts of what must not happen."""
    print(
        f"\n{'':<22}{'faults':>7}{'  first: median':>16}{'p90':>7}{'max':>7}"
        + f"{'  second: median':>17}{'max':>7}",
        end="",
    )
    print(f"{'  back: median':>15}{'max':>7}{'  T: least':>11}{'most':>7}")
    for transport in TRANSPORTS:
        strikes = [strike for run in runs if run.transport == transport for strike in run.strikes]
        for kind in ("all", *WEIGHTS):
            if chosen := [strike for strike in strikes if kind in ("all", strike.kind)]:
                print(f"{transport + ' ' + kind:<22}{format_strikes(chosen)}")
    print()
    totals: Counter[str] = Counter()
    for run in runs:
        totals.update(run.counts)
    seconds, rounds = (sum(run.outcome[name] for run in runs) for name in ("seconds", "num_rounds"))
    restarts = sum(run.outcome["num_restarts"] for run in runs)
    print(
        f"{len(runs)} runs of {seconds / 60:.0f} min in all, {rounds} rounds, {restarts} restarts "
        "by a launcher"
    )
    print(", ".join(f"{what}: {number}" for what, number in totals.items()))


def format_strikes(strikes: Sequence[Strike]) -> str:
    """Format a line of the table."""
    first, second, back = (
        [value if (value := getattr(strike, name)) is not None else inf for strike in strikes]
        for name in ("first_commit", "second_commit", "back")
    )
    bounds = [strike.bound for strike in strikes]
    return (
        f"{len(strikes):>7}{median(first):>16.2f}{p90(first):>7.2f}{max(first):>7.2f}"
        f"{median(second):>17.2f}{max(second):>7.2f}{median(back):>15.2f}{max(back):>7.2f}"
        f"{min(bounds):>11.1f}{max(bounds):>7.1f}"
    )


def p90(values: Sequence[float]) -> float:
    """Return the smallest value that nine tenths of the values do not exceed."""
    return sorted(values)[ceil(0.9 * len(values)) - 1]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", type=int, default=200, help="number of faults over all networks together"
    )
    parser.add_argument("--a-run", type=int, default=20, help="number of faults of one run")
    parser.add_argument("--transports", type=choices(TRANSPORTS), default=list(TRANSPORTS))
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run of each network")
    parser.add_argument("--folder", type=Path, default=Path("runs/outside-faults"))
    parser.add_argument(
        "--not-apart", dest="apart", action="store_false", default=os.geteuid() == 0
    )
    parser.add_argument(
        "--table", action="store_true", help="only print the table of the runs in the folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
