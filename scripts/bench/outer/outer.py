"""Time, CPU time and bytes of reduces and whole synchronisations between islands, ours and others'.

    python scripts/bench/outer/outer.py [--params 25e6] [--islands 2,4]
        [--links loopback,100mbit,1gbit,300mbit-80ms]
        [--what torch,gloo,tls,hivemind,averager] [--codecs fp32,bf16,int8] [--repeats N]
        [--send-buffer BYTES]
        [--json FILE]
    python scripts/bench/outer/outer.py --links 100mbit,1gbit --codecs fp32,int4 \\
        --torchft-python PATH --what
        torch,gloo,hivemind,plain-sync,torchft-sync,gloo-sync,hivemind-sync

Reduces: gloo, tls and hivemind are ours (outer/reduce/reducer.py) over these transports. torch is
torch's all_reduce over gloo, averager is hivemind's DecentralizedAverager. In tls-relayed the last
island can be reached only through a relay, which is a process on a link like the islands'.

Synchronisations begin with local params and end when the next ones have replaced them. plain-sync
is DiLoCo in plain torch (subtract, all_reduce over gloo, SGD, copy); torchft-sync is torchft's
DiLoCo over gloo; gloo-sync, tls-sync and hivemind-sync are our outer loop, with snapshot, plan,
reduce, outer step, digest, vote and merge. All have the same outer optimizer, and each result is
compared with plain torch's.

Every island is a process; on a shaped link each has a network namespace (needs root). All islands
start at the same time, and a repeat lasts until the last one has ended. "CPU" is the time of an
island's process and its libp2p daemon. "share" is ideal time / measured time with ideal = 2 (n - 1)
/ n x payload bytes / link rate. Frames of 1514 bytes carry 1448 of payload, so 0.956 is the
maximum. "x plain" is the measured time over the time of torch or plain-sync, and "x torchft" over
the time of torchft-sync, in fp32 on the same link: below 1 is faster.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

# Otherwise the script's own folder comes first, and `outer` is a file in it, not the package.
sys.path[0] = str(Path(__file__).resolve().parents[3])

from scripts.bench.arguments import add_torchft_python, choices, require_torchft, whole_numbers  # noqa: E402
from scripts.bench.outer.outer_runs import (  # noqa: E402
    LINKS,
    LinkCase,
    Row,
    ideal_seconds,
    measure,
    open_link_namespaces,
)

OURS = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256, "int4": 0.5 + 2 / 128}
PAYLOAD_BYTES = {
    "torch": {"fp32": 4.0, "bf16": 2.0},
    "gloo": OURS,
    "tls": OURS,
    "tls-4-streams": OURS,
    "tls-relayed": OURS,
    "hivemind": OURS,
    "averager": {"fp32": 4.0, "bf16": 2.0, "int8": 1.0},
    "plain-sync": {"fp32": 4.0},
    "torchft-sync": {"fp32": 4.0},
    "gloo-sync": OURS,
    "tls-sync": OURS,
    "hivemind-sync": OURS,
}
"""Payload bytes per parameter, by contestant and codec. Codecs that a contestant does not have are
left out.
"""
DEFAULT = ("torch", "gloo", "hivemind", "averager", "plain-sync", "gloo-sync", "hivemind-sync")
COLUMNS = (
    "seconds",
    "spread",
    "repeats",
    "CPU s",
    "theory",
    "counted",
    "wire",
    "share",
    "x plain",
    "x torchft",
)


async def bench(args: argparse.Namespace) -> list[Row]:
    """Measure all rows and print each when it is done."""
    task = asyncio.current_task()
    assert task is not None, "runs as a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    rows: list[Row] = []
    print(
        f"{'link':<10}{'islands':>7}  {'what':<14}{'codec':<6}"
        + "".join(f"{column:>10}" for column in COLUMNS)
    )
    for link in args.links:
        for num_islands in args.islands:
            with open_link_namespaces(link, num_islands + 1, args.send_buffer) as namespaces:
                # The last namespace is the relay's.
                case = LinkCase(
                    link,
                    num_islands,
                    args.params,
                    namespaces[:-1],
                    args.torchft_python,
                    namespaces[-1:],
                )
                rows += await run_case(case, args)
    return rows


async def run_case(case: LinkCase, args: argparse.Namespace) -> list[Row]:
    """Measure and print every contestant with its codecs on one link. A failure becomes a row."""
    rows: list[Row] = []
    for what in args.what:
        for codec in args.codecs:
            if codec in PAYLOAD_BYTES[what]:
                theory = 2 * (case.num_islands - 1) / case.num_islands * PAYLOAD_BYTES[what][codec]
                rows.append(Row(case.link, case.num_islands, what, codec, theory))
                await measure(case, rows[-1], args.repeats, args.verbose)
                print(format_row(rows[-1], rows, case), flush=True)
    return rows


def format_row(row: Row, rows: Sequence[Row], case: LinkCase) -> str:
    """Format a row as text. `rows`: the rows of the same link and number of islands so far."""
    begin = f"{row.link:<10}{row.islands:>7}  {row.what:<14}{row.codec:<6}"
    if row.failure:
        return f"{begin}  failed: {row.failure}"
    seconds = median(row.seconds)
    spread = (max(row.seconds) - min(row.seconds)) / seconds
    times = f"{seconds:>10.3f}{spread:>10.0%}{len(row.seconds):>10}"
    rate = LINKS[case.link]
    numbers = [
        (median(row.cpu_seconds), 3),
        (row.theory_bytes, 4),
        (median(row.counted_bytes) if row.counted_bytes else None, 4),
        (median(row.wire_bytes) if row.wire_bytes else None, 4),
        (ideal_seconds(row, case.num_params, rate) / seconds if rate else None, 2),
        (ratio(row, "plain-sync" if row.is_sync else "torch", rows), 2),
        (ratio(row, "torchft-sync", rows) if row.is_sync else None, 2),
    ]
    cells = "".join(
        f"{'-':>10}" if value is None else f"{value:>10.{digits}f}" for value, digits in numbers
    )
    end = f"  {len(row.flaws)} more wrong: {row.flaws[0]}" if row.flaws else ""
    return f"{begin}{times}{cells}{end}"


def ratio(row: Row, what: str, rows: Sequence[Row]) -> float | None:
    """Return the row's median seconds over the median seconds of contestant `what` in fp32.

    None if that contestant has none.
    """
    reference = [
        median(other.seconds)
        for other in rows
        if (other.what, other.codec) == (what, "fp32") and other.seconds
    ]
    return median(row.seconds) / reference[0] if reference else None


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=lambda text: int(float(text)), default=25_000_000)
    parser.add_argument("--islands", type=whole_numbers, default=[2, 4])
    parser.add_argument("--links", type=choices(LINKS), default=["loopback", "100mbit", "1gbit"])
    parser.add_argument("--what", type=choices(PAYLOAD_BYTES), default=list(DEFAULT))
    parser.add_argument("--codecs", type=choices(OURS), default=["fp32", "bf16", "int8"])
    repeats = (
        "measured repeats of each row, after one unmeasured repeat; the table shows their medians"
    )
    parser.add_argument("--repeats", type=int, default=5, help=repeats)
    buffers = (
        "most bytes of a connection's send buffer, for the islands' namespaces (default: "
        "this machine's tcp_wmem)"
    )
    parser.add_argument("--send-buffer", type=int, metavar="BYTES", help=buffers)
    add_torchft_python(parser)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--verbose", action="store_true", help="show the stderr of the islands")
    args = parser.parse_args()
    if "torchft-sync" in args.what:
        require_torchft(parser, args.torchft_python)
    return args


def main() -> None:
    """Print the table."""
    args = parse_arguments()
    if os.geteuid() != 0 and any(LINKS[link] for link in args.links):
        print(
            "shaped links use network namespaces, which need root: only loopback is measured (or "
            "use sudo)"
        )
        args.links = [link for link in args.links if LINKS[link] is None]
    started_at = time.monotonic()
    load = os.getloadavg()[0]
    try:
        rows = asyncio.run(bench(args))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("stopped; every process and namespace has been removed")
    print(
        f"{time.monotonic() - started_at:.0f} s in all, on {os.cpu_count()} cores that the islands "
        f"share; load before {load:.1f}; torch "
        f"{', '.join(sorted({row.torch for row in rows if row.torch}))}"
    )
    if any(row.islands > (os.cpu_count() or 1) for row in rows):
        print(
            "more islands than cores: on loopback and at 1 Gbit/s the processor, not the link, may "
            "be the limit"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
