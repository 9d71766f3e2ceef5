"""Payloads over gloo: plain TCP between all endpoints, fast, unencrypted. For clusters that trust each other.

One process group spans all endpoints of an epoch; it is dropped at the first error and never used again.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from outer.errors import DeadlineError, InputError, PeerLost
from outer.transports.base import Endpoint, Tag, Traffic
from outer.wire import checked

MAX_WAIT = timedelta(days=1)
"""Of one gloo call; the real deadline is the caller's, who then disconnects."""
PREAMBLE_BYTES = 48
"""Before each of gloo's messages; a payload takes three: sender ready, receiver ready, the payload itself."""
SENDS_IN_FLIGHT = 2
"""To each endpoint. What it may send to us it learns on the same connection, behind what is being sent already."""
T = TypeVar("T")


class GlooTransport:
    """See outer.transports.base.Transport. `rendezvous` is the host and port of a TCPStore."""

    def __init__(
        self, rendezvous: tuple[str, int], run_id: str, me: Endpoint, listen_host: str, connect_seconds: float
    ) -> None:
        check_listen_host(listen_host)
        self.traffic = Traffic()
        self._rendezvous, self._run_id, self._me = rendezvous, run_id, me
        self._listen_host, self._connect_seconds = listen_host, connect_seconds
        self._group: Any = None  # a ProcessGroupGloo; its stubs lack send and recv
        self._ranks: dict[Endpoint, int] = {}
        self._sending: dict[Endpoint, asyncio.Semaphore] = {}
        self._waiters = _Waiters()

    @property
    def address(self) -> str:
        return f"gloo:{self._me}@{self._listen_host}"

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.disconnect()
        endpoints = sorted(addresses)
        prefix = f"{self._run_id}/groups/{epoch}"
        try:
            async with asyncio.timeout(self._connect_seconds + 1):
                self._group = await in_thread(lambda: self._build(prefix, endpoints))
        except (RuntimeError, TimeoutError) as error:
            missing = await in_thread(lambda: self._missing(prefix, endpoints))
            raise DeadlineError(
                f"the group {epoch!r} was not built within {self._connect_seconds:g} s: "
                + (f"{', '.join(missing)} did not join" if missing else first_line(error))
            ) from None
        self._ranks = {endpoint: rank for rank, endpoint in enumerate(endpoints)}
        self._sending = {endpoint: asyncio.Semaphore(SENDS_IN_FLIGHT) for endpoint in endpoints}

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        group, rank = self._locate(to)
        num_bytes = checked(payload).numel()
        async with self._sending[to]:
            await self._wait(to, lambda: group.send([_full(payload)], rank, gloo_tag(tag, num_bytes)))
        self.traffic.bytes_sent += num_bytes + 2 * PREAMBLE_BYTES
        self.traffic.bytes_received += PREAMBLE_BYTES

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        group, rank = self._locate(source)
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        await self._wait(source, lambda: group.recv([_full(payload)], rank, gloo_tag(tag, num_bytes)))
        self.traffic.bytes_received += num_bytes + 2 * PREAMBLE_BYTES
        self.traffic.bytes_sent += PREAMBLE_BYTES
        return payload

    async def disconnect(self) -> None:
        group, ranks = self._group, self._ranks
        self._group, self._ranks = None, {}
        if group is not None:
            await in_thread(lambda: _break_pairs(group, [r for e, r in ranks.items() if e != self._me]))

    async def close(self) -> None:
        await self.disconnect()
        self._waiters.close()

    def _locate(self, other: Endpoint) -> tuple[Any, int]:
        if self._group is None or other not in self._ranks:
            raise PeerLost(other.island, f"{other} is not in this group")
        return self._group, self._ranks[other]

    async def _wait(self, other: Endpoint, start: Callable[[], dist.Work]) -> None:
        try:
            work = start()
            await in_thread(lambda: work.wait(MAX_WAIT), self._waiters.start)
        except RuntimeError as error:
            raise PeerLost(other.island, first_line(error)) from None

    def _build(self, prefix: str, endpoints: list[Endpoint]) -> dist.ProcessGroupGloo:
        """The group; blocks until all have come. Raises RuntimeError."""
        store = dist.PrefixStore(prefix, self._store())
        store.set(f"here/{endpoints.index(self._me)}", "")
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._listen_host)]
        options._timeout = timedelta(seconds=self._connect_seconds)
        options._threads = 1
        return dist.ProcessGroupGloo(store, endpoints.index(self._me), len(endpoints), options)

    def _store(self) -> dist.TCPStore:
        # A client of its own for each group: an abandoned wait must not block the next.
        host, port = self._rendezvous
        timeout = timedelta(seconds=self._connect_seconds)
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    def _missing(self, prefix: str, endpoints: list[Endpoint]) -> list[str]:
        """The endpoints that have not come, as far as the rendezvous knows."""
        with contextlib.suppress(RuntimeError):
            store = dist.PrefixStore(prefix, self._store())
            return [str(e) for rank, e in enumerate(endpoints) if not store.check([f"here/{rank}"])]
        return []


def gloo_tag(tag: Tag, num_bytes: int) -> int:
    """31 bits: 2 of round and attempt, 1 of phase, 20 of part, 8 of the size.

    Rounds of a group follow one another, so two bits tell neighbours apart. The size is in it because gloo ends
    the process when a message is longer than its buffer: with another size a payload is never delivered.
    """
    turn = (tag.round + tag.attempt) % 4
    return turn << 29 | tag.phase << 28 | (tag.part % (1 << 20)) << 8 | num_bytes % 251


def check_listen_host(host: str) -> None:
    """Raise InputError for an address that is no single one: gloo tells it to the others as it is."""
    if host in ("", "0.0.0.0", "::"):
        raise InputError(
            f"island.listen_host: got {host!r}; gloo needs the one address of this machine that the other islands "
            "reach, e.g. 10.0.0.5. Its traffic is not encrypted: keep it inside a private network"
        )


def new_thread(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread of its own."""
    threading.Thread(target=work, daemon=True).start()


async def in_thread(work: Callable[[], T], start: Callable[[Callable[[], None]], None] = new_thread) -> T:
    """The result of a blocking call. No pool of limited size: any number may block for as long as it takes.

    Cancelled, the thread goes on alone; it is a daemon, so it never holds up the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        result, caught = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed to the waiting task
            caught = error
        with contextlib.suppress(RuntimeError):  # the loop may have been closed meanwhile
            loop.call_soon_threadsafe(settle, result, caught)

    start(run)
    return await future


class _Waiters:
    """Daemon threads, as many as block at a time, kept for the next: an event loop stands still while one starts."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, at once."""
        with self._lock:
            has_idle = self._num_idle > 0
            self._num_idle -= has_idle
        self._work.put(work)
        if not has_idle:
            new_thread(self._serve)

    def close(self) -> None:
        """End the threads that are idle; those that block stay."""
        with self._lock:
            num_idle, self._num_idle = self._num_idle, 0
        for _ in range(num_idle):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._num_idle += 1


def first_line(error: BaseException) -> str:
    """An error's text without gloo's and the store's traces."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]


def _full(payload: torch.Tensor) -> torch.Tensor:
    """The payload, or one byte in the place of none: gloo sends no empty messages."""
    return payload if payload.numel() else torch.zeros(1, dtype=torch.uint8)


def _break_pairs(group: Any, ranks: list[int]) -> None:
    """Close every connection of the group, so that what waits on it, here and there, fails at once.

    gloo has no other cancel: a wait that runs out closes its pair and fails all that waits on it.
    """
    for rank in ranks:
        with contextlib.suppress(RuntimeError):
            work = group.recv([torch.empty(1, dtype=torch.uint8)], rank, (1 << 31) - 1)
            work.wait(timedelta(milliseconds=1))
