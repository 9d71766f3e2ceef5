"""The runs of scripts/bench/outer/outer.py: one contestant's islands, and the figures of a row."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from diloco.network_emulation.links import open_linked_namespaces, parse_link, sent_bytes
from diloco.network_emulation.namespaces import Namespace, run_tool
from tests.integration.relay_process import relay_process

ROOT = Path(__file__).resolve().parents[3]
LINKS = {
    "loopback": None,
    "100mbit": 100e6,
    "1gbit": 1e9,
    "300mbit-80ms": 300e6,
    "100mbit-200ms": 100e6,
    "1gbit-100ms": 1e9,
}
"""Rate in bit/s, by the name of the link; a name may end in a round-trip time."""
ANSWER_SECONDS = 180.0
CLOSE_SECONDS = 10.0
START_SECONDS = 0.2


class BenchError(Exception):
    """A contestant failed. The others are still measured."""


@dataclass(frozen=True)
class LinkCase:
    """A link and a number of islands. `namespaces` is empty on loopback."""

    link: str
    num_islands: int
    num_params: int
    namespaces: Sequence[Namespace]
    torchft_python: str
    relay_namespaces: Sequence[Namespace] = ()

    def host(self, index: int) -> str:
        return self.namespaces[index].host if self.namespaces else "127.0.0.1"

    def command(self, what: str, index: int) -> list[str]:
        """Return the command that starts an island's process."""
        python = self.torchft_python if what == "torchft-sync" else sys.executable
        words = [python, "-m", "scripts.bench.outer.outer_island"]
        return self.namespaces[index].command(*words) if self.namespaces else words

    def sent_bytes(self) -> int:
        """Return the bytes that all islands together have sent on their links so far."""
        return sum(map(sent_bytes, self.namespaces))


@dataclass
class Row:
    """One row of the table. Bytes are per parameter, averaged over the islands."""

    link: str
    islands: int
    what: str
    codec: str
    theory_bytes: float
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds of an island's processes: the islands' mean, for each repeat."""
    counted_bytes: list[float] = field(default_factory=list)
    wire_bytes: list[float] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    """What was wrong with results of repeats that reported success.

    These repeats' times do not count.
    """
    failure: str = ""
    torch: str = ""
    """The version of torch that the row's islands use."""

    @property
    def is_sync(self) -> bool:
        """Whether the row measures whole synchronisations, not reduces alone."""
        return self.what.endswith("-sync")


class Island:
    """A process that runs one island of a contestant."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, timeout_seconds: float = ANSWER_SECONDS, **command: Any) -> dict[str, Any]:
        """Send a command and return the reply. Raises BenchError when it fails or no reply arrives
        in time.
        """
        assert self._process.stdin and self._process.stdout, "started with pipes"
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchError(
                f"no answer to {command['do']} within {timeout_seconds:.0f} s"
            ) from None
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
async def start_islands(case: LinkCase, row: Row, verbose: bool) -> AsyncIterator[list[Island]]:
    """Start the islands of a row's contestant and connect them with each other. They are ended at
    exit.
    """
    islands: list[Island] = []
    relays = contextlib.ExitStack()
    try:
        relay = [relays.enter_context(open_relay(case))] if row.what == "tls-relayed" else []
        for index in range(case.num_islands):
            islands.append(await _start(case, row.what, index, verbose))
        replies: list[dict[str, Any]] = []
        for index, island in enumerate(islands):
            seat = {
                "index": index,
                "num_islands": case.num_islands,
                "num_params": case.num_params,
                "codec": row.codec,
                "host": case.host(index),
                "bootstrap": replies[0]["bootstrap"] if replies else [],
                "relays": relay if index == case.num_islands - 1 else [],
            }
            replies.append(await island.ask(do="open", what=row.what, seat=seat))
        row.torch = replies[0]["torch"]
        await _ask_all(islands, do="connect", addresses=[reply["address"] for reply in replies])
        yield islands
    finally:
        await asyncio.gather(*(island.close() for island in islands))
        relays.close()


@contextlib.contextmanager
def open_relay(case: LinkCase) -> Iterator[str]:
    """Open a relay in a process of its own, and yield its address."""
    place = case.relay_namespaces[0] if case.relay_namespaces else None
    with relay_process(
        "--host", place.host if place else "127.0.0.1", prefix=place.command() if place else []
    ) as opened:
        yield opened[0]


async def _start(case: LinkCase, what: str, index: int, verbose: bool) -> Island:
    device = "eth0" if case.namespaces else "lo"
    process = await asyncio.create_subprocess_exec(
        *case.command(what, index),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if verbose else asyncio.subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device},
        # In a process group of its own, it gets no Ctrl-C, and the whole group can be killed.
        start_new_session=True,
    )
    return Island(process)


async def _ask_all(islands: Sequence[Island], **command: Any) -> list[dict[str, Any]]:
    return await asyncio.gather(*(island.ask(**command) for island in islands))


async def measure(case: LinkCase, row: Row, repeats: int, verbose: bool) -> None:
    """Start the row's islands and measure its seconds and bytes.

    An error becomes the row's failure.
    """
    try:
        async with start_islands(case, row, verbose) as islands:
            for number in range(1 + repeats):
                await _repeat(case, islands, row, is_warm=number > 0)
    except BenchError as error:
        row.failure = str(error)
    if not row.seconds and not row.failure:
        row.failure = f"every result was wrong: {row.flaws[0]}"


async def _repeat(case: LinkCase, islands: Sequence[Island], row: Row, *, is_warm: bool) -> None:
    """Run the contestant once.

    The first run opens connections, and counts only if its result is wrong.
    """
    rate = LINKS[case.link]
    per_param = 1 / case.num_islands / case.num_params
    timeout = 60 + 20 * (ideal_seconds(row, case.num_params, rate) if rate else 0)
    await _ask_all(islands, do="prepare")
    before = case.sent_bytes()
    start = time.monotonic() + START_SECONDS
    replies = await _ask_all(
        islands, do="run", at=start, timeout=timeout, timeout_seconds=timeout + 10
    )
    if flaw := _find_flaw(replies):
        row.flaws.append(flaw)
    elif is_warm:
        row.seconds.append(max(reply["ended"] for reply in replies) - start)
        row.cpu_seconds.append(mean(reply["cpu"] for reply in replies))
        if case.namespaces:
            row.wire_bytes.append((case.sent_bytes() - before) * per_param)
        if replies[0]["sent_bytes"] is not None:
            row.counted_bytes.append(sum(reply["sent_bytes"] for reply in replies) * per_param)


def _find_flaw(replies: Sequence[dict[str, Any]]) -> str:
    """Describe what is wrong with the islands' results, or return ""."""
    if len({reply["digest"] for reply in replies}) > 1:
        return "the islands' results differ"
    return next((reply["flaw"] for reply in replies if reply["flaw"]), "")


def ideal_seconds(row: Row, num_params: int, rate: float) -> float:
    """Return the seconds that the payload alone takes at `rate`, in bit/s."""
    return row.theory_bytes * num_params * 8 / rate


@contextlib.contextmanager
def open_link_namespaces(
    link: str, num_islands: int, send_buffer: int | None
) -> Iterator[Sequence[Namespace]]:
    """Open the namespaces of a link; none for loopback.

    `send_buffer`: most bytes of a connection's send buffer.
    """
    if LINKS[link] is None:
        yield ()
        return
    with open_linked_namespaces(
        num_islands, parse_link(link.replace("-", ",rtt="))[1]
    ) as namespaces:
        for place in namespaces if send_buffer else ():
            run_tool(*place.command("sysctl", "-qw", f"net.ipv4.tcp_wmem=4096 16384 {send_buffer}"))
        yield namespaces
