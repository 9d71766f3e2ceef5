"""Measured beside predicted: what `diloco plan` says of a run's outer loop, held against the run itself.

    .venv/bin/python -m scripts.bench.utilisation [--links 50mbit 100mbit 1gbit] [--islands 2 4]
    .venv/bin/python -m scripts.bench.utilisation --overlap    what of a round's cost a delay hides
    .venv/bin/python -m scripts.bench.utilisation --wire       bytes on the links, by codec, against the formula

Islands are processes in network namespaces of their own with shaped links (needs root); their inner steps sleep until
they have lasted exactly --step-seconds, so that this machine's cores need not be the islands'. Utilisation is inner
steps x their length / time of a cycle; the median of all islands' cycles but the first.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from diloco.planning.predict import Prediction, predict
from diloco.planning.round_bytes import fragments_of
from outer.coding import coding_of
from outer.config import OuterConfig
from outer.fragments import groups_of
from outer.space import Space
from scripts.bench.utilisation_runs import WARM_CYCLES, Event, Run, done, lasting, task_of

CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "e3m0", "stat2", "topk", "lowrank")
BLOCKING_SHARE = 0.3
"""--overlap: a blocking round takes so much of what its inner steps take."""
SEGMENT_BYTES, HEADER_BYTES = 1448, 66
"""Of TCP's payload in a frame, and of Ethernet, IP and TCP with time stamps around it."""
PREAMBLE_BYTES = 48
"""Of gloo's messages. A payload takes two small ones, one each way, and one before itself."""
ACK_BYTES = 65536
"""Received for each acknowledgement that goes alone: as much of a stream as the kernel hands over at once."""
NEXT_TO_NOTHING = {"codec": "topk", "coding": {"top_k": 1, "chunk_elements": 65536}}
"""--wire: what a round of these takes is its messages."""


# -- utilisation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What was measured and predicted; seconds are of a cycle."""

    run: Run
    utilisation: float
    round_seconds: float
    """From launches to the ends of their rounds; with a delay to the end of the reduce, without vote and outer step."""
    copy_seconds: float
    """Snapshot and merge."""
    predicted: Prediction

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.utilisation / self.predicted.utilisation

    def __str__(self) -> str:
        run, outer, told = self.run, self.run.config, self.predicted
        told_round = told.total_seconds - told.compute_seconds - told.copy_seconds + told.hidden_seconds
        return (
            f"{run.link_text:<16}{run.num_islands:>7}  {outer.codec:<7}{outer.fragments:>5}{outer.delay:>6}"
            f"{outer.inner_steps:>6}{self.utilisation:>10.1%}{told.utilisation:>10.1%}{self.ratio:>7.3f}"
            f"{self.round_seconds:>9.3f}{told_round:>9.3f}{self.copy_seconds:>8.3f}{told.copy_seconds:>8.3f}"
        )


HEADER = (
    f"{'link':<16}{'islands':>7}  {'codec':<7}{'frag.':>5}{'delay':>6}{'steps':>6}{'measured':>10}{'predicted':>10}"
    f"{'ratio':>7}{'round s':>9}{'pred.':>9}{'copy s':>8}{'pred.':>8}"
)


def row_of(run: Run, found: list[list[Event]]) -> Row:
    """A run's row."""
    outer = run.config
    compute = outer.inner_steps * run.task.step_seconds
    steady = [event for events in found for event in events[outer.fragments * WARM_CYCLES :]]
    rounds = [event["waited"] if outer.delay == 0 else event["plan"] + event["reduce"] for event in steady]
    return Row(
        run,
        median(compute / seconds for events in found for seconds in cycles(events, outer)),
        outer.fragments * median(rounds),
        outer.fragments * median(event["launch"] + event["merge"] for event in steady),
        predict(run.case),
    )


def cycles(events: Sequence[Event], outer: OuterConfig) -> list[float]:
    """Seconds from each landing to the same fragment's next, but for the first cycle.

    With a delay not to the very last either, which no inner steps follow.
    """
    times = [event["time"] for event in events][outer.fragments * WARM_CYCLES - 1 :]
    times = times[:-1] if outer.delay else times
    return [b - a for a, b in zip(times, times[outer.fragments :], strict=False)]


def grid(args: argparse.Namespace) -> list[Row]:
    """All rows, printed as they come."""
    rows: list[Row] = []
    print(HEADER)
    for link in args.links:
        for num_islands in args.islands:
            settings = [{"codec": c, "inner_steps": n} for c in args.codecs for n in args.inner_steps]
            settings += [
                {"codec": args.codecs[-1], "inner_steps": 32, "fragments": 4, "delay": delay} for delay in (2,)
            ]
            tasks = [
                task_of(args.params, args.step_seconds, num_islands, transport=args.transport, **setting)
                for setting in settings
            ]
            rows += measured([lasting(Run(link, num_islands, task), args.seconds) for task in tasks])
    off = [row for row in rows if abs(row.ratio - 1) > 0.1]
    print(f"{len(rows) - len(off)} of {len(rows)} within 10 %; ratios {min(r.ratio for r in rows):.3f} to ", end="")
    print(f"{max(r.ratio for r in rows):.3f}, median {median(r.ratio for r in rows):.3f}")
    return rows


def measured(runs: Sequence[Run]) -> list[Row]:
    """The rows of runs that have the link and number of islands in common, printed as they come."""
    rows: list[Row] = []
    with closing(done(runs)) as results:
        for run, found in zip(runs, results, strict=True):
            rows.append(row_of(run, found))
            print(rows[-1], flush=True)
    return rows


# -- overlap -----------------------------------------------------------------------------------------------------


def overlap(args: argparse.Namespace) -> None:
    """What each delay hides of what a blocking round costs; without communication inner steps last what they last."""
    num_islands, inner_steps = args.islands[0], 64
    shared = {"transport": args.transport, "inner_steps": inner_steps, "codec": args.codecs[0]}
    blocking = Run(args.links[0], num_islands, task_of(args.params, 1.0, num_islands, **shared))
    told = predict(blocking.case)
    step_seconds = (told.total_seconds - told.compute_seconds) / BLOCKING_SHARE / inner_steps
    settings = [{}, {"delay": 32}, *({"fragments": 4, "delay": delay} for delay in (4, 8, 16))]
    tasks = [task_of(args.params, step_seconds, num_islands, **shared, **setting) for setting in settings]
    print(f"{inner_steps} inner steps of {step_seconds * 1e3:.0f} ms\n{HEADER}")
    rows = measured([lasting(Run(args.links[0], num_islands, task), args.seconds) for task in tasks])
    # Time beyond the inner steps, in units of theirs.
    costs = [1 / row.utilisation - 1 for row in rows]
    print(f"a blocking round costs {costs[0]:.1%} of its inner steps' time")
    for row, cost in list(zip(rows, costs, strict=True))[1:]:
        outer = row.run.config
        print(
            f"fragments {outer.fragments}, delay {outer.delay:>2}: {1 - cost / costs[0]:.1%} of it hidden, "
            f"{row.utilisation:.1%} of the inner steps a second without communication"
        )


# -- bytes -------------------------------------------------------------------------------------------------------


def wire(args: argparse.Namespace) -> None:
    """By codec: bytes that an island's link carries up in a round, beside what they should be, term by term.

    At last the payload as bits for each parameter and peer.
    """
    print(f"{'codec':<9}{'payload':>12}{'gloo':>9}{'frames':>10}{'acks':>9}{'messages':>10}{'sum':>12}", end="")
    print(f"{'measured':>12}{'ratio':>7}{'bits a peer':>13}")
    for num_islands in args.islands:
        shared = {"transport": "gloo", "inner_steps": 1, "rounds": WARM_CYCLES + 4}
        tasks = [task_of(args.params, 0.5, num_islands, **NEXT_TO_NOTHING, **shared)]
        tasks += [task_of(args.params, 0.5, num_islands, codec=codec, **shared) for codec in args.wire_codecs]
        runs = [Run(args.links[0], num_islands, task) for task in tasks]
        with closing(done(runs, counts_wire=True)) as results:
            messages = sent(next(results)) - sum(terms(runs[0]))
            for run, found in zip(runs[1:], results, strict=True):
                print(wire_line(run, messages, sent(found)), flush=True)


def sent(found: list[list[Event]]) -> float:
    """Bytes that a link carries up in a round: the mean over islands, of the median over rounds."""
    return mean(median(b["wire"] - a["wire"] for a, b in pairwise(events[WARM_CYCLES - 1 :])) for events in found)


def terms(run: Run) -> tuple[float, float, float, float]:
    """Bytes that an island sends in a round, on average: payloads, gloo's own, headers of frames, acknowledgements."""
    outer, islands = run.config, run.num_islands
    coding, specs = coding_of(outer), run.case.specs
    space = Space(
        specs, outer.part_elements, coding.block_elements, groups_of(specs, outer, splits_fine=coding.splits_fine)
    )
    payload_bytes = sum(fragment.sent_bytes for fragment in fragments_of(outer, specs, islands))
    payloads = sum((islands - 1) * (1 if coding.gathers(part) else 2 / islands) for part in space.parts)
    gloo = 3 * PREAMBLE_BYTES * payloads
    frames = 2 * payloads + (payload_bytes + payloads * PREAMBLE_BYTES) / SEGMENT_BYTES
    return payload_bytes, gloo, frames * HEADER_BYTES, payload_bytes / ACK_BYTES * HEADER_BYTES


def wire_line(run: Run, messages: float, measured: float) -> str:
    """One codec's row."""
    payload, gloo, frames, acks = terms(run)
    total = payload + gloo + frames + acks + messages
    num_params = sum(fragment.num_elements for fragment in fragments_of(run.config, run.case.specs, run.num_islands))
    return (
        f"{run.config.codec:<9}{payload:>12.0f}{gloo:>9.0f}{frames:>10.0f}{acks:>9.0f}{messages:>10.0f}{total:>12.0f}"
        f"{measured:>12.0f}{measured / total:>7.3f}{8 * payload / num_params / (run.num_islands - 1):>13.3f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["50mbit", "100mbit", "1gbit"])
    parser.add_argument("--islands", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4"])
    parser.add_argument("--wire-codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--inner-steps", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--params", type=lambda text: int(float(text)), default=10_000_000)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=12.0, help="that each line measures, about")
    parser.add_argument("--transport", choices=["gloo", "hivemind"], default="gloo")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--wire", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; every process and namespace has been removed"))
    started_at = time.monotonic()
    if args.overlap:
        overlap(args)
    elif args.wire:
        wire(args)
    else:
        grid(args)
    print(f"{time.monotonic() - started_at:.0f} s in all, on {os.cpu_count()} cores that the islands share")


if __name__ == "__main__":
    main()
