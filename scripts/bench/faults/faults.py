"""The cost of faults for a run: stalls, freezes, joins and storms, with real processes on this
machine.

    python scripts/bench/faults/faults.py [stall] [freeze] [join] [storm]
        [--transports gloo,tls,hivemind]
        [--moments any,reduce] [--kills 10] [--faults 50] [--params 25e6] [--seed 0] [--json FILE]

stall   One of 4 islands is killed, at a random moment of a round or in the middle of its reduce,
        when the first mean has arrived. The stall is the survivors' next round, from commit to
        commit, minus the median quiet round; nothing else is subtracted, so a kill in the reduce
        costs a second reduce, too. Over hivemind the island is killed alone and with its libp2p
        daemon, as when its machine dies. "noise" is the same difference without a kill.
freeze  One of 4 islands is frozen for 20 s: when the others commit next, and when it is back in a
        committed round.
join    A new island takes the state of 4 islands on links of 100 Mbit/s (needs root), then three do
        so at once.
storm   Seeded faults of mixed kinds over 5 islands: how much is committed, and how much work is
        lost.

Inner steps have a fixed duration in stall, freeze and storm, so that rounds do not get faster when
a core is freed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, get_args

# Otherwise the script's own folder comes first, and `outer` is a file in it, not the package.
sys.path[0] = str(Path(__file__).resolve().parents[3])

from scripts.bench.arguments import choices  # noqa: E402
from scripts.bench.faults.fault_join import Join, measure_joins  # noqa: E402
from scripts.bench.faults.fault_stall import (  # noqa: E402
    FaultBenchError,
    Moment,
    Stall,
    measure_freeze,
    measure_stall,
)
from tests.faults.storm import StormSettings, run_storm  # noqa: E402

TRANSPORTS = ("gloo", "tls", "hivemind")
TARGETS = {"gloo": 0.3, "tls": 0.3, "hivemind": 0.5}
"""Target for the stall after a kill, in seconds, on an idle machine with two cores."""
STORM_ISLANDS = 5
STORM_RATE = 5.0
Figures = dict[str, Any]


def show_stall(transport: str, args: argparse.Namespace) -> Figures:
    """Measure and print the stall by moment of the kill; over hivemind both with and without the
    daemon.
    """
    figures: Figures = {}
    for how in ("process", "process and daemon") if transport == "hivemind" else ("process",):
        for moment in args.moments:
            stall = measure_stall(
                transport, args.kills, args.seed, moment, with_daemon=how != "process"
            )
            figures[f"{how}, {moment}"] = asdict(stall)
            _print_stall(f"stall   {transport:<9}{how:<19}{moment:<7}", stall, TARGETS[transport])
    return figures


def _print_stall(begin: str, stall: Stall, target: float) -> None:
    quiet = stall.quiet
    killed = stall.killed
    usual = median(quiet.rounds)
    middle = median(stall.stalls)
    noise = stall.noise
    indent = " " * len(begin)
    print(
        f"{begin}median {middle:+.3f} s (target {target}), {middle / usual:+.1%} of a round of "
        f"{usual:.2f} s, of which "
        f"the reduce takes {median(quiet.reduces):.3f} s; max {max(stall.stalls):+.3f} s; "
        f"{len(stall.stalls)} kills"
        + (f", {stall.num_void} more came too late" if stall.num_void else "")
    )
    print(
        f"{indent}noise: median {median(noise):+.3f} s, max {max(noise):+.3f} s; {len(noise)} "
        "rounds without a kill"
    )
    plan, reduce = (
        median(k) - median(q)
        for k, q in ((killed.waits, quiet.waits), (killed.reduces, quiet.reduces))
    )
    rest = killed.rest - quiet.rest
    print(
        f"{indent}including plan {plan:+.3f} s, connect and reduce {reduce:+.3f} s, "
        f"steps, vote and outer step {rest:+.3f} s (medians)"
    )


def show_freeze(transport: str, args: argparse.Namespace) -> Figures:
    """Measure and print one freeze."""
    freeze = measure_freeze(transport, args.seed)
    print(
        f"freeze  {transport:<9}the others' next commit after {freeze.first_commit:.1f} s (rounds "
        f"of {freeze.round_seconds:.1f} s), {freeze.rounds_meanwhile} rounds during the freeze; "
        f"back in the {_ordinal(freeze.rounds_until_back)} round committed after it woke, "
        f"{freeze.seconds_until_back:.1f} s later"
    )
    return asdict(freeze)


def show_join(transport: str, args: argparse.Namespace) -> Figures:
    """Measure and print one join, then three at once."""
    if os.geteuid() != 0:
        raise FaultBenchError("shaped links are network namespaces, which need root (or use sudo)")
    alone, three = measure_joins(transport, args.params)
    for who, join in (("one", alone), *(("of three", join) for join in three)):
        _print_join(f"join    {transport:<9}{who:<9}", join)
    seconds = max(join.first_commit for join in three) - min(join.began for join in three)
    print(
        f"join    {transport:<9}all three are in a committed round {seconds:.1f} s after the first "
        "began"
    )
    return {"alone": asdict(alone), "three": [asdict(join) for join in three]}


def _print_join(begin: str, join: Join) -> None:
    seconds = join.entered - join.began
    print(
        f"{begin}{join.wire_bytes / 8 / join.num_params:.3f} x 8 bytes per parameter in "
        f"{seconds:.1f} s = {seconds / join.ideal_seconds:.2f} x ideal; state of round "
        f"{join.state_round}, first committed round {join.first_round}; the others' slowest round "
        f"during the join {join.slowest_round:.1f} s, before it {join.rounds_before:.1f} s"
    )


def show_storm(transport: str, args: argparse.Namespace) -> Figures:
    """Run one storm and print what was committed."""
    setting = StormSettings(transport, STORM_ISLANDS, args.faults, STORM_RATE, args.seed)
    with tempfile.TemporaryDirectory(prefix="diloco-faults-") as folder:
        outcome = run_storm(setting, Path(folder))
    summary = outcome.summary
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(summary["faults"].items()))
    print(
        f"storm   {transport:<9}{sum(summary['faults'].values())} faults ({kinds}) in "
        f"{outcome.seconds:.0f} s: {summary['rounds_committed']} rounds committed, "
        f"{summary['rounds_aborted']} attempts aborted, {len(summary['rounds_disagreeing'])} "
        f"rounds with more than one result, {summary['committed_share']:.1%} of "
        f"{summary['steps_trained']} inner steps in committed rounds"
    )
    return summary


FIGURES: dict[str, Callable[[str, argparse.Namespace], Figures]] = {
    "stall": show_stall,
    "freeze": show_freeze,
    "join": show_join,
    "storm": show_storm,
}


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", help=f"any of {', '.join(FIGURES)}; default: all"
    )
    parser.add_argument("--transports", type=choices(TRANSPORTS), default=list(TRANSPORTS))
    moments = "when islands are killed in stall: at a random moment of a round, in the reduce"
    parser.add_argument(
        "--moments", type=choices(get_args(Moment)), default=list(get_args(Moment)), help=moments
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--faults", type=int, default=50, help="number of faults of the storm")
    parser.add_argument(
        "--params",
        type=lambda text: int(float(text)),
        default=25_000_000,
        help="number of parameters of the model that joiners take",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if unknown := set(args.figures) - set(FIGURES):
        parser.error(f"got {', '.join(sorted(unknown))}; allowed: {', '.join(FIGURES)}")
    return args


def main() -> None:
    """Print the figures. A figure that fails does not stop the others."""
    args = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    measured: dict[str, Figures] = {}
    has_failed = False
    for name in args.figures or FIGURES:
        for transport in args.transports:
            before = os.getloadavg()[0]
            started = time.monotonic()
            try:
                measured[f"{name} {transport}"] = FIGURES[name](transport, args)
            except (FaultBenchError, AssertionError) as error:
                has_failed = True
                print(f"{name:<8}{transport:<9}failed: {error}")
            load = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
            print(
                f"{'':<8}({time.monotonic() - started:.0f} s on {os.cpu_count()} cores, {load})",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1))
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
