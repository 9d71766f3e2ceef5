"""Runs of 8 islands and more on virtual time: messages, bytes, commit and processor time by size.

    python -m scripts.bench.scale.scale                       # 8, 16, 32 and 64 islands at 100
                                                              Mbit/s and 50 ms
    python -m scripts.bench.scale.scale --islands 8,128 --link 1gbit,rtt=20ms --plot scale.png

All figures but the processor time follow from the arguments alone, however busy the machine is.
"""

import argparse
import os
import time
from pathlib import Path

from diloco.config.schema import load_config
from diloco.faults.disturbances import Disturbances
from diloco.virtual.results import Results, measure, quantile
from diloco.virtual.run import run_virtually
from diloco.virtual.simulate import VirtualRequest, build_run
from scripts.bench.arguments import whole_numbers

CONTROL = ("ready", "plannotice", "plan", "vote", "votelist", "votereceipt", "settled", "status")
COLUMNS = (
    "| islands | utilisation | commit: median, p90, max "
    "| ready, notice, plan, vote, list, receipt, settled, status | all small "
    "| payloads | MB sent | small MB of one, most | link in use | CPU per round: island, most | "
    "first bottleneck |"
)


def main() -> None:
    options = parse_arguments()
    print(
        f"{options.config}, {' '.join(options.overrides)}: steps of {options.step_seconds}, "
        f"{options.link}"
    )
    print(COLUMNS + "\n|" + "---|" * 11)
    found = []
    for num_islands in options.islands:
        started = time.process_time()
        results = simulate(options, num_islands)
        print(row(results), flush=True)
        found.append(results)
        print(
            f"    {time.process_time() - started:.1f} CPU s, {results.num_rounds} rounds",
            flush=True,
        )
        for name, error in results.errors.items():
            print(f"    {name} has failed: {error}")
    print(f"on {os.cpu_count()} cores at a load of {os.getloadavg()[0]:.1f}")
    if options.plot is not None:
        plot(found, options.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--islands", type=whole_numbers, default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--step-seconds", default="0.5")
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--link", default="100mbit,rtt=50ms")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args()


def simulate(options: argparse.Namespace, num_islands: int) -> Results:
    """Simulate one size, and return its results."""
    config = load_config(options.config, [f"outer.rounds={options.rounds}", *options.overrides])
    request = VirtualRequest(
        num_islands, options.step_seconds, options.spread, None, Disturbances(links=(options.link,))
    )
    return measure(run_virtually(build_run(config, request)))


def row(results: Results) -> str:
    """Format a line of the table."""
    times = results.commit_seconds
    small = sum(number for kind, number in results.messages.items() if kind != "payload")
    cells = [
        f"{results.num_islands}",
        "-" if results.utilisation is None else f"{results.utilisation:.3f}",
        ", ".join(
            f"{value:.2f}" for value in (quantile(times, 0.5), quantile(times, 0.9), times[-1])
        ),
        ", ".join(f"{results.messages.get(kind, 0.0):.0f}" for kind in CONTROL),
        f"{small:.0f}",
        f"{results.messages.get('payload', 0.0):.0f}",
        f"{sum(results.sent_bytes.values()) / 1e6:.2f}",
        f"{results.busiest_sender[1] / 1e6:.3f}",
        f"{results.link_share:.2f}",
        f"{results.cpu_seconds:.3f}, {results.busiest_cpu[1]:.3f}",
        results.bottleneck,
    ]
    return f"| {' | '.join(cells)} |"


def plot(found: list[Results], path: Path) -> None:
    """Plot small messages, time to commit and processor time against the number of islands."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [results.num_islands for results in found]
    curves = {
        "small messages of an island per round": [
            sum(number for kind, number in results.messages.items() if kind != "payload")
            for results in found
        ],
        "seconds to commit, median": [quantile(results.commit_seconds, 0.5) for results in found],
        "CPU seconds of an island per round": [results.cpu_seconds for results in found],
    }
    figure, axes = pyplot.subplots(1, len(curves), figsize=(12, 3.4))
    for axis, (title, values) in zip(axes, curves.items(), strict=True):
        axis.plot(sizes, values, marker="o")
        axis.set(title=title, xlabel="islands", xscale="log", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(path)


if __name__ == "__main__":
    main()
