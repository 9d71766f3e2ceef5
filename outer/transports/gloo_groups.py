"""Builds the gloo group of an epoch's endpoints, which meet through a store that the first of them serves."""

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from outer.errors import DeadlineError, InputError, PeerLost, first_line
from outer.network.endpoints import ISLAND_NAME, Endpoint

PROBE_SECONDS = 5.0
MARGIN_SECONDS = 1.0
"""Extra time for the waiting thread, whose error names the missing endpoints."""
POLL_SECONDS = 0.005
NOTICE_SECONDS = 0.2
"""When a group fails because an endpoint died, the connection to it breaks within this time and identifies it."""
KEPT_GROUPS = 2
"""Number of groups whose keys a store keeps. Another endpoint may still be building the previous group."""
T = TypeVar("T")
HostPort = tuple[str, int]
_ADDRESS = re.compile(rf"gloo:({ISLAND_NAME}/[0-9]{{1,4}})@([A-Za-z0-9.:-]{{1,253}}):([0-9]{{1,5}})")


class GroupStore:
    """Serves a TCPStore for those groups that this endpoint is the first of."""

    def __init__(self, host: str) -> None:
        try:
            listening = socket.create_server((host, 0))
        except OSError as error:
            raise InputError(
                f"island.listen_host: cannot listen on {host}: {error.strerror}; choose an address of this machine"
            ) from None
        self.address: HostPort = (host, listening.getsockname()[1])
        self._store: dist.TCPStore | None = dist.TCPStore(
            *self.address, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._prefixes: list[str] = []  # of the groups whose keys the store holds, oldest first

    def begin(self, prefix: str) -> None:
        """Make room for a group's keys by dropping those of old groups. Blocks."""
        self._prefixes = [*(p for p in self._prefixes if p != prefix), prefix]
        old, self._prefixes = self._prefixes[:-KEPT_GROUPS], self._prefixes[-KEPT_GROUPS:]
        for key in self.keys() if old else []:
            if key.startswith(tuple(f"{p}/" for p in old)) and self._store is not None:
                self._store.delete_key(key)

    def keys(self) -> list[str]:
        return self._store.list_keys() if self._store is not None else []  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        self._store = None


@dataclass(frozen=True)
class GroupSpec:
    """A group to be built, as one of its endpoints sees it."""

    prefix: str
    me: Endpoint
    stores: Mapping[Endpoint, HostPort]
    listen_host: str
    seconds: float
    """Longest wait for the other endpoints."""


async def build_group(spec: GroupSpec) -> dist.ProcessGroupGloo:
    """Wait until all endpoints have joined, and build their group.

    Raises PeerLost as soon as an endpoint is unreachable or dies, and DeadlineError, which names the late endpoints.
    """
    cancelled = threading.Event()
    async with contextlib.AsyncExitStack() as stack:
        gone = await _watch_all(spec, stack)
        building = asyncio.create_task(in_thread(lambda: _join(spec, cancelled)))
        building.add_done_callback(lambda task: task.cancelled() or task.exception())
        stack.push_async_callback(_give_up, building, cancelled)
        seconds = spec.seconds + MARGIN_SECONDS
        await asyncio.wait({building, *gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if building.done() and building.exception() is None:
            return building.result()
        if building.done() and gone:
            await asyncio.wait(gone, timeout=NOTICE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for lost in gone:
            if lost.done():
                raise lost.result()
        if building.done():
            return building.result()  # raises
    raise _not_built(spec, "no answer")


async def _give_up(building: "asyncio.Task[dist.ProcessGroupGloo]", cancelled: threading.Event) -> None:
    """End the building thread, unless it is within gloo: if it returned while the process ends, gloo would abort."""
    cancelled.set()
    await asyncio.wait({building}, timeout=NOTICE_SECONDS)
    building.cancel()


def parse_address(endpoint: Endpoint, address: str) -> HostPort:
    """Parse the address of an endpoint's store, `gloo:<island>/<rank>@host:port`. Raises PeerLost."""
    found = _ADDRESS.fullmatch(address)
    if found is None or found[1] != str(endpoint) or not 0 < int(found[3]) < 65536:
        raise PeerLost(endpoint.island, f"its record holds a malformed address of {endpoint}: {address[:80]!r}")
    return found[2], int(found[3])


async def _watch_all(spec: GroupSpec, stack: contextlib.AsyncExitStack) -> list[asyncio.Task[PeerLost]]:
    """Connect to the other endpoints until `stack` closes. Each returned task ends when its endpoint has died."""

    async def watch(endpoint: Endpoint, address: HostPort) -> asyncio.Task[PeerLost]:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                reader, writer = await asyncio.open_connection(*address)
        except (OSError, TimeoutError) as error:
            raise PeerLost(endpoint.island, f"{endpoint} cannot be reached: {first_line(error)}") from None
        # The lambda also keeps the writer, which would otherwise close itself.
        stack.callback(lambda: writer.transport.abort())
        task = asyncio.create_task(_wait_until_gone(endpoint, reader))
        stack.callback(task.cancel)
        return task

    watching = (watch(e, address) for e, address in spec.stores.items() if e != spec.me)
    found = await asyncio.gather(*watching, return_exceptions=True)
    if errors := [error for error in found if isinstance(error, BaseException)]:
        raise errors[0]
    return [task for task in found if not isinstance(task, BaseException)]


async def _wait_until_gone(endpoint: Endpoint, reader: asyncio.StreamReader) -> PeerLost:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1024):
            pass
    return PeerLost(endpoint.island, f"{endpoint} went away before the group was built")


def _join(spec: GroupSpec, cancelled: threading.Event) -> dist.ProcessGroupGloo:
    """Join the group. Blocks until all endpoints have joined. Raises DeadlineError."""
    endpoints = sorted(spec.stores)
    rank = endpoints.index(spec.me)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=spec.listen_host)]
    options._timeout = timedelta(seconds=spec.seconds)
    options._threads = 1
    try:
        # Each group has its own client, so that an abandoned wait does not block the next group.
        address, limit = spec.stores[endpoints[0]], timedelta(seconds=spec.seconds)
        client = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
        store = dist.PrefixStore(spec.prefix, client)
        store.set(f"here/{rank}", "")
        missing = _wait_for_all(store, endpoints, spec.seconds, cancelled)
        if missing:
            raise _not_built(spec, f"{', '.join(missing)} did not join")
        return dist.ProcessGroupGloo(store, rank, len(endpoints), options)
    except RuntimeError as error:
        if isinstance(error, DeadlineError):
            raise
        raise _not_built(spec, first_line(error)) from None


def _wait_for_all(
    store: dist.Store, endpoints: list[Endpoint], seconds: float, cancelled: threading.Event
) -> list[str]:
    """Wait until all have joined, and return those missing at the deadline. A wait within gloo cannot be cancelled."""
    keys = [f"here/{rank}" for rank in range(len(endpoints))]
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if cancelled.wait(POLL_SECONDS) or time.monotonic() > deadline:
            return [str(e) for e, key in zip(endpoints, keys, strict=True) if not store.check([key])]
    return []


def _not_built(spec: GroupSpec, cause: str) -> DeadlineError:
    return DeadlineError(f"the group {spec.prefix!r} was not built within {spec.seconds:g} s: {cause}")


def new_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


async def in_thread(work: Callable[[], T], start: Callable[[Callable[[], None]], None] = new_thread) -> T:
    """Run a blocking call in a daemon thread and return its result. After a cancellation the thread continues."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so the thread can always settle it

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - handed to the waiting task
            future.set_exception(error)

    start(run)
    return await asyncio.wrap_future(future)
