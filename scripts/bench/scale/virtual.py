"""Compares `diloco simulate --virtual` with real islands: utilisation and seconds of a round.

    python -m scripts.bench.scale.virtual            # 2 and 4 islands, 20 and 50 Mbit/s, int8 and
                                                     int4; needs root
    python -m scripts.bench.scale.virtual --links 20mbit,rtt=50ms --islands 2 3 4 --codecs fp32

The real islands are those of scripts/bench/utilisation/utilisation.py: processes in network
namespaces with shaped links, whose inner steps sleep until they have lasted exactly --step-seconds.
The virtual islands have the same links and steps. The time of their own work is predicted by
`diloco plan`'s model of this machine, multiplied by the number of real islands per core.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import closing

from diloco.network_emulation.links import Links
from diloco.planning.predict import Prediction
from diloco.virtual.results import Results, measure
from diloco.virtual.run import VirtualRun, run_virtually
from scripts.bench.utilisation.utilisation import ComparisonRow, build_row
from scripts.bench.utilisation.utilisation_runs import (
    PlannedRun,
    build_task,
    run_all,
    with_duration,
)

VIRTUAL_ROUNDS = 5
HEADER = (
    f"{'link':<18}{'islands':>7}  "
    f"{'codec':<6}{'steps':>6}{'measured':>10}{'virtual':>9}{'ratio':>7}{'round s':>9}"
    f"{'virt.':>8}"
)


def main() -> None:
    options = parse_arguments()
    print(HEADER)
    ratios = []
    for runs in plan_runs(options):
        with closing(run_all(runs)) as found:
            for run, events in zip(runs, found, strict=True):
                row = build_row(run, events)
                virtual = simulate(run, row.predicted)
                assert virtual.utilisation is not None, "it makes several rounds"
                ratios.append(row.utilisation / virtual.utilisation)
                print(format_row(row, virtual, ratios[-1]), flush=True)
    off = sum(abs(ratio - 1) > 0.1 for ratio in ratios)
    print(
        f"{len(ratios) - off} of {len(ratios)} within 10 %; measured / virtual {min(ratios):.3f} "
        f"to {max(ratios):.3f}"
    )
    print(f"on {os.cpu_count()} cores at a load of {os.getloadavg()[0]:.1f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", default=["20mbit", "50mbit"])
    parser.add_argument("--islands", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4"])
    parser.add_argument("--inner-steps", nargs="+", type=int, default=[32])
    parser.add_argument("--params", type=lambda text: int(float(text)), default=4_000_000)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="approximate duration of each real run"
    )
    parser.add_argument("--transport", choices=["gloo", "tls", "hivemind"], default="gloo")
    return parser.parse_args()


def plan_runs(options: argparse.Namespace) -> Iterator[list[PlannedRun]]:
    """Yield lists of real runs. The runs of a list have the same link and number of islands."""
    for link in options.links:
        for num_islands in options.islands:
            settings = [
                {"codec": codec, "inner_steps": n}
                for codec in options.codecs
                for n in options.inner_steps
            ]
            shared = (options.params, options.step_seconds, num_islands)
            tasks = [
                build_task(*shared, transport=options.transport, **setting) for setting in settings
            ]
            yield [
                with_duration(PlannedRun(link, num_islands, task), options.seconds)
                for task in tasks
            ]


def simulate(run: PlannedRun, predicted: Prediction) -> Results:
    """Simulate the same run on virtual time."""
    own_work = predicted.copy_seconds + predicted.codec_seconds + predicted.step_seconds
    on_each_core = max(1.0, run.num_islands / (os.cpu_count() or 1))
    virtual = VirtualRun(
        outer=run.config.model_copy(update={"rounds": VIRTUAL_ROUNDS}),
        specs=run.case.specs,
        num_islands=run.num_islands,
        step_seconds=run.task.step_seconds,
        host_seconds=own_work * on_each_core,
        links=Links(run.link),
        tokens_per_step=1000,
    )
    return measure(run_virtually(virtual))


def format_row(row: ComparisonRow, virtual: Results, ratio: float) -> str:
    run = row.run
    outer = row.run.config
    terms = virtual.terms
    return (
        f"{run.link_text:<18}{run.num_islands:>7}  "
        f"{outer.codec:<6}{outer.inner_steps:>6}{row.utilisation:>10.1%}"
        f"{virtual.utilisation or 0.0:>9.1%}{ratio:>7.3f}"
        f"{row.round_seconds:>9.3f}{terms.round - terms.compute:>8.3f}"
    )


if __name__ == "__main__":
    main()
