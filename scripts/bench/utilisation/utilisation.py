"""Compares the utilisation that `diloco plan` predicts with the measured one.

    .venv/bin/python -m scripts.bench.utilisation.utilisation [--links 50mbit 100mbit 1gbit]
        [--islands 2 4]
    .venv/bin/python -m scripts.bench.utilisation.utilisation --overlap    share of a round's cost
                                                                           that a delay hides
    .venv/bin/python -m scripts.bench.utilisation.utilisation --overlap --computing
        [--fragments 1 4] [--delays 1 2 5]
    .venv/bin/python -m scripts.bench.utilisation.utilisation --wire       bytes by codec, compared
                                                                           with the formula

Islands are processes in network namespaces with shaped links (needs root). Their inner steps sleep
until they have lasted exactly --step-seconds, so that the measurement does not depend on this
machine's cores. Utilisation is inner steps x step time / cycle time, as the median over the cycles
of all islands without the first cycle.

With --computing inner steps are matrix products instead, on a core for each island. A step's time
is then the median over the steps of blocking rounds, during which nothing is sent. Any slowdown of
steps during a delay therefore counts as a cost of the round.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

import torch

from diloco.planning.predict import Prediction, predict
from outer.codecs.choice import build_codec_choice, build_space
from outer.config import OuterConfig
from outer.cost import round_bytes
from scripts.bench.utilisation.utilisation_island import PRODUCT_DIM, multiply
from scripts.bench.utilisation.utilisation_runs import (
    WARM_CYCLES,
    Event,
    PlannedRun,
    build_task,
    run_all,
    with_duration,
)

CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "e3m0", "stat2", "topk", "lowrank")
BLOCKING_SHARE = 0.3
"""--overlap: cost of a blocking round relative to its inner steps."""
SEGMENT_BYTES = 1448
HEADER_BYTES = 66
"""Bytes of TCP payload in a frame, and of the headers of Ethernet, IP and TCP with time stamps."""
PREAMBLE_BYTES = 48
"""Bytes of gloo's small messages. A payload needs one in each direction and one in front."""
ACK_BYTES = 65536
"""Bytes received per pure acknowledgement: what the kernel delivers at once of a stream."""
NEXT_TO_NOTHING = {"codec": "topk", "coding": {"top_k": 1, "chunk_elements": 65536}}
"""--wire: settings whose rounds consist almost only of protocol messages."""


# -- utilisation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonRow:
    """Measured and predicted figures of one run. All seconds are per cycle."""

    run: PlannedRun
    utilisation: float
    round_seconds: float
    """Seconds from launch to the end of the round; with a delay, to the end of the reduce."""
    copy_seconds: float
    """Seconds of snapshot and merge."""
    cpu_seconds: float
    """Processor seconds of an island."""
    predicted: Prediction

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.utilisation / self.predicted.utilisation

    def __str__(self) -> str:
        run = self.run
        outer = self.run.config
        predicted = self.predicted
        predicted_round = (
            predicted.total_seconds
            - predicted.compute_seconds
            - predicted.copy_seconds
            + predicted.hidden_seconds
        )
        return (
            f"{run.link_text:<16}{run.num_islands:>7}  "
            f"{outer.codec:<7}{outer.fragments:>5}{outer.delay:>6}"
            f"{outer.inner_steps:>6}{self.utilisation:>10.1%}{predicted.utilisation:>10.1%}{self.ratio:>7.3f}"
            f"{self.round_seconds:>9.3f}{predicted_round:>9.3f}{self.copy_seconds:>8.3f}{predicted.copy_seconds:>8.3f}"
        )


HEADER = (
    f"{'link':<16}{'islands':>7}  "
    f"{'codec':<7}{'frag.':>5}{'delay':>6}{'steps':>6}{'measured':>10}{'predicted':>10}"
    f"{'ratio':>7}{'round s':>9}{'pred.':>9}{'copy s':>8}{'pred.':>8}"
)


def build_row(run: PlannedRun, found: list[list[Event]]) -> ComparisonRow:
    """Build the row of a run from the events of its islands."""
    outer = run.config
    compute = outer.inner_steps * run.task.step_seconds
    steady = [event for events in found for event in events[outer.fragments * WARM_CYCLES :]]
    rounds = [
        event["waited"] if outer.delay == 0 else event["plan"] + event["reduce"] for event in steady
    ]
    return ComparisonRow(
        run,
        median(compute / seconds for events in found for seconds in cycle_seconds(events, outer)),
        outer.fragments * median(rounds),
        outer.fragments * median(event["launch"] + event["merge"] for event in steady),
        median(
            b["cpu"] - a["cpu"]
            for events in found
            for a, b in zip(events, events[outer.fragments :], strict=False)
        ),
        predict(run.case),
    )


def cycle_seconds(events: Sequence[Event], outer: OuterConfig) -> list[float]:
    """Return the seconds from each landing of a fragment to its next one, without the first cycle.

    With a delay the last landing is left out too, because no inner steps follow it.
    """
    times = [event["time"] for event in events][outer.fragments * WARM_CYCLES - 1 :]
    times = times[:-1] if outer.delay else times
    return [b - a for a, b in zip(times, times[outer.fragments :], strict=False)]


def print_grid(args: argparse.Namespace) -> list[ComparisonRow]:
    """Measure all rows and print each when it is done."""
    rows: list[ComparisonRow] = []
    print(HEADER)
    for link in args.links:
        for num_islands in args.islands:
            settings = [
                {"codec": c, "inner_steps": n} for c in args.codecs for n in args.inner_steps
            ]
            settings += [
                {"codec": args.codecs[-1], "inner_steps": 32, "fragments": 4, "delay": delay}
                for delay in (2,)
            ]
            tasks = [
                build_task(
                    args.params, args.step_seconds, num_islands, transport=args.transport, **setting
                )
                for setting in settings
            ]
            rows += measure_rows(
                [with_duration(PlannedRun(link, num_islands, task), args.seconds) for task in tasks]
            )
    off = [row for row in rows if abs(row.ratio - 1) > 0.1]
    print(
        f"{len(rows) - len(off)} of {len(rows)} within 10 %; ratios "
        f"{min(r.ratio for r in rows):.3f} to ",
        end="",
    )
    print(f"{max(r.ratio for r in rows):.3f}, median {median(r.ratio for r in rows):.3f}")
    return rows


def measure_rows(runs: Sequence[PlannedRun]) -> list[ComparisonRow]:
    """Measure runs with the same link and number of islands; print each row when it is done.

    If steps compute, the first run must have blocking rounds: its step time is used for all runs.
    """
    rows: list[ComparisonRow] = []
    with closing(run_all(runs)) as results:
        for run, found in zip(runs, results, strict=True):
            if run.task.products:
                seconds = rows[0].run.task.step_seconds if rows else find_step_seconds(run, found)
                run = replace(run, task=replace(run.task, step_seconds=seconds))
            rows.append(build_row(run, found))
            print(rows[-1], flush=True)
    return rows


def find_step_seconds(run: PlannedRun, found: list[list[Event]]) -> float:
    """Return the median seconds of the inner steps of blocking rounds, without the first cycle."""
    return (
        median(e["stepped"] for events in found for e in events[WARM_CYCLES:])
        / run.config.inner_steps
    )


def count_products(seconds: float, sample: int = 500) -> int:
    """Return how many matrix products of an island take about `seconds` on one core."""
    torch.set_num_threads(1)
    factor = torch.rand(PRODUCT_DIM, PRODUCT_DIM)
    multiply(factor, sample)
    started_at = time.monotonic()
    multiply(factor, sample)
    return max(1, round(seconds * sample / (time.monotonic() - started_at)))


# -- overlap ---------------------------------------------------------------------------------------


def print_overlap(args: argparse.Namespace) -> None:
    """Print the share of a blocking round's cost that each delay hides."""
    num_islands = args.islands[0]
    inner_steps = 64
    shared = {"transport": args.transport, "inner_steps": inner_steps, "codec": args.codecs[0]}
    # A round must land before the next one is launched.
    delays = [
        (count, delay)
        for count in args.fragments
        for delay in args.delays
        if delay <= inner_steps // count
    ]
    blocking = PlannedRun(
        args.links[0], num_islands, build_task(args.params, 1.0, num_islands, **shared)
    )
    predicted = predict(blocking.case)
    step_seconds = (
        (predicted.total_seconds - predicted.compute_seconds) / BLOCKING_SHARE / inner_steps
    )
    settings = [{}, *({"fragments": fragments, "delay": delay} for fragments, delay in delays)]
    tasks = [
        build_task(args.params, step_seconds, num_islands, **shared, **setting)
        for setting in settings
    ]
    if args.computing:
        tasks = [replace(task, products=count_products(step_seconds)) for task in tasks]
    print(f"{inner_steps} inner steps of {step_seconds * 1e3:.0f} ms\n{HEADER}")
    rows = measure_rows(
        [
            with_duration(PlannedRun(args.links[0], num_islands, task), args.seconds)
            for task in tasks
        ]
    )
    # Time beyond the inner steps' time, relative to it.
    costs = [1 / row.utilisation - 1 for row in rows]
    print(f"a blocking round costs {costs[0]:.1%} of its inner steps' time")
    for row, cost in list(zip(rows, costs, strict=True))[1:]:
        outer = row.run.config
        most = min(costs[0], outer.fragments * outer.delay / inner_steps)
        print(
            f"fragments {outer.fragments}, delay {outer.delay:>2} of "
            f"{row.run.task.step_seconds * 1e3:.0f} ms: {1 - cost / costs[0]:.1%} of it is hidden, "
            f"{(costs[0] - cost) / most:.1%} of what this delay can hide, {row.utilisation:.1%} of "
            "the inner steps per second without communication; a cycle takes "
            f"{row.cpu_seconds:.2f} s of an island's processor, a blocking one "
            f"{rows[0].cpu_seconds:.2f} s"
        )


# -- bytes -----------------------------------------------------------------------------------------


def print_wire_bytes(args: argparse.Namespace) -> None:
    """Print, by codec, an island's bytes on its link per round, and their expected terms.

    The last column is the payload in bits per parameter and peer.
    """
    print(
        f"{'codec':<9}{'payload':>12}{'gloo':>9}{'frames':>10}{'acks':>9}{'messages':>10}{'sum':>12}",
        end="",
    )
    print(f"{'measured':>12}{'ratio':>7}{'bits a peer':>13}")
    for num_islands in args.islands:
        shared = {"transport": "gloo", "inner_steps": 1, "rounds": WARM_CYCLES + 4}
        tasks = [build_task(args.params, 0.5, num_islands, **NEXT_TO_NOTHING, **shared)]
        tasks += [
            build_task(args.params, 0.5, num_islands, codec=codec, **shared)
            for codec in args.wire_codecs
        ]
        runs = [PlannedRun(args.links[0], num_islands, task) for task in tasks]
        with closing(run_all(runs, counts_wire=True)) as results:
            messages = sent_bytes_per_round(next(results)) - sum(wire_byte_terms(runs[0]))
            for run, found in zip(runs[1:], results, strict=True):
                print(format_wire_row(run, messages, sent_bytes_per_round(found)), flush=True)


def sent_bytes_per_round(found: list[list[Event]]) -> float:
    """Return an island's bytes on its link per round: the islands' mean of medians over rounds."""
    return mean(
        median(b["wire"] - a["wire"] for a, b in pairwise(events[WARM_CYCLES - 1 :]))
        for events in found
    )


def wire_byte_terms(run: PlannedRun) -> tuple[float, float, float, float]:
    """Return the terms of the bytes that an island is expected to send per round.

    They are payloads, gloo's messages, frame headers and acknowledgements.
    """
    outer = run.config
    islands = run.num_islands
    codecs = build_codec_choice(outer)
    specs = run.case.specs
    space = build_space(specs, outer)
    payload_bytes = sum(fragment.sent_bytes for fragment in round_bytes(outer, specs, islands))
    payloads = sum(
        (islands - 1) * (1 if codecs.gathers(part) else 2 / islands) for part in space.parts
    )
    gloo = 3 * PREAMBLE_BYTES * payloads
    frames = 2 * payloads + (payload_bytes + payloads * PREAMBLE_BYTES) / SEGMENT_BYTES
    return payload_bytes, gloo, frames * HEADER_BYTES, payload_bytes / ACK_BYTES * HEADER_BYTES


def format_wire_row(run: PlannedRun, messages: float, measured: float) -> str:
    """Format the row of one codec."""
    payload, gloo, frames, acks = wire_byte_terms(run)
    total = payload + gloo + frames + acks + messages
    num_params = sum(
        fragment.num_elements
        for fragment in round_bytes(run.config, run.case.specs, run.num_islands)
    )
    return (
        f"{run.config.codec:<9}{payload:>12.0f}{gloo:>9.0f}{frames:>10.0f}{acks:>9.0f}{messages:>10.0f}{total:>12.0f}"
        f"{measured:>12.0f}{measured / total:>7.3f}"
        f"{8 * payload / num_params / (run.num_islands - 1):>13.3f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", default=["50mbit", "100mbit", "1gbit"])
    parser.add_argument("--islands", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4"])
    parser.add_argument("--wire-codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--inner-steps", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--params", type=lambda text: int(float(text)), default=10_000_000)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument(
        "--seconds",
        type=float,
        default=12.0,
        help="approximate duration of the measurement of each row",
    )
    parser.add_argument("--transport", choices=["gloo", "tls", "hivemind"], default="gloo")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument(
        "--computing",
        action="store_true",
        help="with --overlap: inner steps compute matrix products",
    )
    parser.add_argument(
        "--fragments",
        nargs="+",
        type=int,
        default=[1, 4],
        help="with --overlap: values of outer.fragments",
    )
    parser.add_argument(
        "--delays",
        nargs="+",
        type=int,
        default=[4, 8, 16, 32],
        help="with --overlap: values of outer.delay that fit between two rounds",
    )
    parser.add_argument("--wire", action="store_true")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("stopped; every process and namespace has been removed")
    )
    started_at = time.monotonic()
    if args.overlap:
        print_overlap(args)
    elif args.wire:
        print_wire_bytes(args)
    else:
        print_grid(args)
    print(
        f"{time.monotonic() - started_at:.0f} s in all, on {os.cpu_count()} cores that the islands "
        "share"
    )


if __name__ == "__main__":
    main()
