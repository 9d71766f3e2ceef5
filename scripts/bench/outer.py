"""Time and bytes of one reduce between islands, for our transports and those of torch and hivemind.

    python scripts/bench/outer.py [--params 25e6] [--islands 2,4] [--links loopback,100mbit,1gbit]
        [--what torch,gloo,hivemind,averager] [--codecs fp32,bf16,int8] [--repeats N] [--json FILE]

gloo and hivemind are our reduce (outer/reduce/reducer.py) over these transports; torch is its all_reduce over gloo,
averager is hivemind's DecentralizedAverager. Every island is a process; on a shaped link each has a network namespace
(needs root). "share" is ideal time / measured time with ideal = 2 (n - 1) / n x payload bytes / link rate. Frames of
1514 bytes carry 1448 of payload, so 0.956 is the maximum. On loopback it is torch's fp32 time / measured time.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Run as a script, this folder would come first on the path, and `outer` would be a file here instead of the package.
sys.path[0] = str(ROOT)

from diloco.network_emulation.links import open_linked_namespaces, parse_link, sent_bytes  # noqa: E402
from diloco.network_emulation.namespaces import Namespace  # noqa: E402
from scripts.bench.arguments import choices, whole_numbers  # noqa: E402

LINKS = {"loopback": None, "100mbit": 100e6, "1gbit": 1e9}
CODECS = {
    "gloo": {"fp32": "fp32", "bf16": "bf16", "int8": "int8"},
    "hivemind": {"fp32": "fp32", "bf16": "bf16", "int8": "int8"},
    "torch": {"fp32": "fp32", "bf16": "bf16"},
    "averager": {"fp32": "none", "bf16": "fp16", "int8": "uniform8"},
}
"""Each contestant's name for our codecs, or for its closest equivalent."""
PAYLOAD_BYTES = {
    "gloo": {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256},
    "hivemind": {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256},
    "torch": {"fp32": 4.0, "bf16": 2.0},
    "averager": {"none": 4.0, "fp16": 2.0, "uniform8": 1.0},
}
"""Payload bytes per parameter."""
ANSWER_SECONDS = 90.0
CLOSE_SECONDS = 10.0
START_SECONDS = 0.2
SLOW_SECONDS = 6.0
"""Rows are not repeated beyond this total time. At 100 Mbit/s, repeats agree within one percent."""


class BenchError(Exception):
    """A contestant failed. The others are still measured."""


@dataclass(frozen=True)
class LinkCase:
    """A link and a number of islands. `namespaces` is empty on loopback."""

    link: str
    num_islands: int
    num_params: int
    namespaces: Sequence[Namespace]

    def host(self, index: int) -> str:
        return self.namespaces[index].host if self.namespaces else "127.0.0.1"

    def command(self, index: int) -> list[str]:
        """Command that starts an island's process."""
        words = [sys.executable, "-m", "scripts.bench.outer_island"]
        return self.namespaces[index].command(*words) if self.namespaces else words

    def sent_bytes(self) -> int:
        """Bytes that all islands together have sent on their links so far."""
        return sum(map(sent_bytes, self.namespaces))


@dataclass
class ReduceRow:
    """One row of the table. Bytes are per parameter, averaged over the islands."""

    link: str
    islands: int
    what: str
    codec: str
    theory_bytes: float
    seconds: list[float] = field(default_factory=list)
    counted_bytes: float | None = None
    wire_bytes: float | None = None
    share: float | None = None
    flaws: list[str] = field(default_factory=list)
    """Problems of repeats that reported success but had a wrong result. Their times do not count."""
    failure: str = ""


class Island:
    """A process that runs one island of a contestant."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, timeout_seconds: float = ANSWER_SECONDS, **command: Any) -> dict[str, Any]:
        """Send a command and return the reply. Raises BenchError when it fails or no reply arrives in time."""
        assert self._process.stdin and self._process.stdout, "started with pipes"
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchError(f"no answer to {command['do']} within {timeout_seconds:.0f} s") from None
        reply = json.loads(line or '{"error": "the process ended"}')
        if "error" in reply:
            raise BenchError(f"{command['do']}: {reply['error']}")
        return reply

    async def close(self) -> None:
        """Wait CLOSE_SECONDS for the process to end, then kill its process group."""
        assert self._process.stdin, "started with pipes"
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


@contextlib.asynccontextmanager
async def start_islands(case: LinkCase, what: str, verbose: bool) -> AsyncIterator[list[Island]]:
    """Start the islands of one contestant and connect them with each other. They are ended at exit."""
    islands: list[Island] = []
    try:
        for index in range(case.num_islands):
            islands.append(await _start(case, index, verbose))
        replies: list[dict[str, Any]] = []
        for index, island in enumerate(islands):
            seat = {
                "index": index,
                "num_islands": case.num_islands,
                "num_params": case.num_params,
                "host": case.host(index),
                "bootstrap": replies[0]["bootstrap"] if replies else [],
            }
            replies.append(await island.ask(do="open", what=what, seat=seat))
        await _ask_all(islands, do="connect", addresses=[reply["address"] for reply in replies])
        yield islands
    finally:
        await asyncio.gather(*(island.close() for island in islands))


async def _start(case: LinkCase, index: int, verbose: bool) -> Island:
    device = "eth0" if case.namespaces else "lo"
    process = await asyncio.create_subprocess_exec(
        *case.command(index),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if verbose else asyncio.subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device},
        # With a process group of its own, Ctrl-C reaches only this process, and the whole group can be killed.
        start_new_session=True,
    )
    return Island(process)


async def _ask_all(islands: Sequence[Island], **command: Any) -> list[dict[str, Any]]:
    return await asyncio.gather(*(island.ask(**command) for island in islands))


async def measure(case: LinkCase, islands: Sequence[Island], row: ReduceRow, repeats: int) -> None:
    """Measure a row's seconds and bytes. Raises BenchError."""
    counted: list[float] = []
    wire: list[float] = []
    rate = LINKS[case.link]
    timeout = 30 + 20 * (ideal_seconds(row, case.num_params, rate) if rate else 0)
    per_param = 1 / case.num_islands / case.num_params
    for _ in range(repeats):
        await _ask_all(islands, do="prepare", codec=row.codec)
        before = case.sent_bytes()
        start = time.monotonic() + START_SECONDS
        replies = await _ask_all(islands, do="reduce", at=start, timeout=timeout, timeout_seconds=timeout + 10)
        if flaw := _find_flaw(replies):
            row.flaws.append(flaw)
            continue
        row.seconds.append(max(reply["ended"] for reply in replies) - start)
        wire.append((case.sent_bytes() - before) * per_param)
        if replies[0]["sent_bytes"] is not None:
            counted.append(sum(reply["sent_bytes"] for reply in replies) * per_param)
        if sum(row.seconds) > SLOW_SECONDS:
            break
    if not row.seconds:
        row.failure = f"every result was wrong: {row.flaws[0]}"
        return
    row.counted_bytes = median(counted) if counted else None
    row.wire_bytes = median(wire) if case.namespaces else None


def _find_flaw(replies: Sequence[dict[str, Any]]) -> str:
    """Describe what is wrong with the islands' results, or return ""."""
    if len({reply["digest"] for reply in replies}) > 1:
        return "the islands' results differ"
    return next((reply["flaw"] for reply in replies if reply["flaw"]), "")


def ideal_seconds(row: ReduceRow, num_params: int, rate: float) -> float:
    """Seconds that the payload alone takes at `rate`, in bit/s."""
    return row.theory_bytes * num_params * 8 / rate


async def run_case(case: LinkCase, args: argparse.Namespace, show: Callable[[ReduceRow], None]) -> list[ReduceRow]:
    """Measure every contestant and codec on one link. A failure becomes a row."""
    rows: list[ReduceRow] = []
    for what in args.what:
        pending = [_build_row(case, what, codec) for codec in args.codecs if codec in CODECS[what]]
        rows += pending
        try:
            async with start_islands(case, what, args.verbose) as islands:
                while pending:
                    row = pending[0]
                    await measure(case, islands, row, args.repeats)
                    row.share = None if row.failure else share(row, rows, case)
                    show(pending.pop(0))
        except BenchError as error:
            for row in pending:
                row.failure = str(error)
                show(row)
    return rows


def _build_row(case: LinkCase, what: str, codec: str) -> ReduceRow:
    name = CODECS[what][codec]
    n = case.num_islands
    return ReduceRow(case.link, n, what, name, 2 * (n - 1) / n * PAYLOAD_BYTES[what][name])


def share(row: ReduceRow, rows: Sequence[ReduceRow], case: LinkCase) -> float | None:
    """Ideal over measured time. On loopback, torch's fp32 time over measured time."""
    rate = LINKS[case.link]
    if rate is not None:
        return ideal_seconds(row, case.num_params, rate) / median(row.seconds)
    reference = [r for r in rows if (r.what, r.codec) == ("torch", "fp32") and r.seconds]
    return median(reference[0].seconds) / median(row.seconds) if reference else None


@contextlib.contextmanager
def open_link_namespaces(link: str, num_islands: int) -> Iterator[Sequence[Namespace]]:
    """Open the namespaces of a link; none for loopback."""
    if LINKS[link] is None:
        yield ()
        return
    with open_linked_namespaces(num_islands, parse_link(link)[1]) as namespaces:
        yield namespaces


async def bench(args: argparse.Namespace) -> list[ReduceRow]:
    """Measure all rows and print each when it is done."""
    task = asyncio.current_task()
    assert task is not None, "runs as a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    rows: list[ReduceRow] = []
    print(HEADER)
    for link in args.links:
        for num_islands in args.islands:
            with open_link_namespaces(link, num_islands) as namespaces:
                case = LinkCase(link, num_islands, args.params, namespaces)
                rows += await run_case(case, args, lambda row: print(format_row(row), flush=True))
    return rows


HEADER = (
    f"{'link':<10}{'islands':>7}  {'what':<9}{'codec':<9}{'seconds':>8}{'spread':>8}{'repeats':>8}"
    f"{'theory':>9}{'counted':>9}{'wire':>9}{'share':>7}"
)


def format_row(row: ReduceRow) -> str:
    """Format a row as text."""
    begin = f"{row.link:<10}{row.islands:>7}  {row.what:<9}{row.codec:<9}"
    if row.failure:
        return f"{begin}  failed: {row.failure}"
    spread = (max(row.seconds) - min(row.seconds)) / median(row.seconds)
    numbers = (_number(value, 9, 4) for value in (row.theory_bytes, row.counted_bytes, row.wire_bytes))
    times = f"{median(row.seconds):>8.3f}{spread:>8.0%}{len(row.seconds):>8}"
    end = f"  {len(row.flaws)} more wrong: {row.flaws[0]}" if row.flaws else ""
    return f"{begin}{times}{''.join(numbers)}{_number(row.share, 7, 2)}{end}"


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=lambda text: int(float(text)), default=25_000_000)
    parser.add_argument("--islands", type=whole_numbers, default=[2, 4])
    parser.add_argument("--links", type=choices(LINKS), default=list(LINKS))
    parser.add_argument("--what", type=choices(CODECS), default=["torch", "gloo", "hivemind", "averager"])
    parser.add_argument("--codecs", type=choices(CODECS["gloo"]), default=list(CODECS["gloo"]))
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="repeats of each row, of which the median is printed; slow rows get fewer",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--verbose", action="store_true", help="show the stderr of the islands")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    args = parse_arguments()
    if os.geteuid() != 0 and any(LINKS[link] for link in args.links):
        print("shaped links use network namespaces, which need root: only loopback is measured (or use sudo)")
        args.links = [link for link in args.links if LINKS[link] is None]
    started_at = time.monotonic()
    try:
        rows = asyncio.run(bench(args))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("stopped; every process and namespace has been removed")
    print(f"{time.monotonic() - started_at:.0f} s in all, on {os.cpu_count()} cores that the islands share")
    if any(row.islands > (os.cpu_count() or 1) for row in rows):
        print("more islands than cores: on loopback and at 1 Gbit/s the processor, not the link, may be the limit")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
