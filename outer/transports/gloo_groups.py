"""How the endpoints of an epoch become one gloo group: through a store that the first of them serves."""

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from outer.errors import DeadlineError, InputError, PeerLost
from outer.transports.base import Endpoint

PROBE_SECONDS = 5.0
"""Longest wait for an endpoint to take a connection."""
MARGIN_SECONDS = 1.0
"""Given to the thread that waits, which says who is missing."""
POLL_SECONDS = 0.005
"""Between two looks at who has come."""
NOTICE_SECONDS = 0.2
"""A group that fails because an endpoint has died: its connection breaks within so long, and says which."""
KEPT_GROUPS = 2
"""Groups whose keys a store keeps: somebody may still be building the one before."""
T = TypeVar("T")
At = tuple[str, int]
"""Host and port."""
_ADDRESS = re.compile(r"gloo:([A-Za-z0-9._-]{1,64}/[0-9]{1,4})@([A-Za-z0-9.:-]{1,253}):([0-9]{1,5})")


class GroupStore:
    """A TCPStore that is served for the groups which this endpoint is the first of."""

    def __init__(self, host: str) -> None:
        try:
            listening = socket.create_server((host, 0))
        except OSError as error:
            raise InputError(
                f"island.listen_host: cannot listen on {host}: {error.strerror}; choose an address of this machine"
            ) from None
        self.at: At = (host, listening.getsockname()[1])
        self._store: dist.TCPStore | None = dist.TCPStore(
            *self.at, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._prefixes: list[str] = []
        """Of the groups whose keys are there, oldest first."""

    def begin(self, prefix: str) -> None:
        """Make room for a group's keys by dropping those of old groups; a blocking call."""
        self._prefixes = [*(p for p in self._prefixes if p != prefix), prefix]
        old, self._prefixes = self._prefixes[:-KEPT_GROUPS], self._prefixes[-KEPT_GROUPS:]
        for key in self.keys() if old else []:
            if key.startswith(tuple(f"{p}/" for p in old)) and self._store is not None:
                self._store.delete_key(key)

    def keys(self) -> list[str]:
        """All that is held; a blocking call."""
        return self._store.list_keys() if self._store is not None else []  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._store = None


@dataclass(frozen=True)
class Gathering:
    """What an endpoint knows of a group before it exists."""

    prefix: str
    """Of its keys in the store, the same for all."""
    me: Endpoint
    stores: Mapping[Endpoint, At]
    """Of every endpoint, this one included."""
    listen_host: str
    seconds: float
    """Longest wait for the others."""

    @property
    def endpoints(self) -> list[Endpoint]:
        """In the order of their ranks."""
        return sorted(self.stores)


async def build_group(gathering: Gathering) -> dist.ProcessGroupGloo:
    """The group of all these endpoints, once all have come.

    Raises PeerLost, at once, for one that cannot be reached or dies meanwhile; DeadlineError names who did not come.
    """
    given_up = threading.Event()
    async with contextlib.AsyncExitStack() as stack:
        gone = await _watch_all({e: at for e, at in gathering.stores.items() if e != gathering.me}, stack)
        building = asyncio.create_task(in_thread(lambda: _join(gathering, given_up)))
        building.add_done_callback(lambda task: task.cancelled() or task.exception())
        stack.push_async_callback(_give_up, building, given_up)
        seconds = gathering.seconds + MARGIN_SECONDS
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
    raise _not_built(gathering, "no answer")


async def _give_up(building: "asyncio.Task[dist.ProcessGroupGloo]", given_up: threading.Event) -> None:
    """End the thread, unless it is within gloo: one that comes back when the process ends would abort it."""
    given_up.set()
    await asyncio.wait({building}, timeout=NOTICE_SECONDS)
    building.cancel()


def parse_address(endpoint: Endpoint, address: str) -> At:
    """Where an endpoint's store is, from `gloo:<island>/<rank>@host:port`. Raises PeerLost when it is malformed."""
    found = _ADDRESS.fullmatch(address)
    if found is None or found[1] != str(endpoint) or not 0 < int(found[3]) < 65536:
        raise PeerLost(endpoint.island, f"its record holds a malformed address of {endpoint}: {address[:80]!r}")
    return found[2], int(found[3])


async def _watch_all(others: Mapping[Endpoint, At], stack: contextlib.AsyncExitStack) -> list[asyncio.Task[PeerLost]]:
    """Connections to these endpoints, held until `stack` ends: a task is done when its endpoint has died."""

    async def watch(endpoint: Endpoint, at: At) -> asyncio.Task[PeerLost]:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                reader, writer = await asyncio.open_connection(*at)
        except (OSError, TimeoutError) as error:
            raise PeerLost(endpoint.island, f"{endpoint} cannot be reached: {first_line(error)}") from None
        stack.callback(lambda: writer.transport.abort())  # a writer that nobody holds closes itself
        task = asyncio.create_task(_until_gone(endpoint, reader))
        stack.callback(task.cancel)
        return task

    found = await asyncio.gather(*(watch(e, at) for e, at in others.items()), return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return [task for task in found if not isinstance(task, BaseException)]


async def _until_gone(endpoint: Endpoint, reader: asyncio.StreamReader) -> PeerLost:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1024):
            pass
    return PeerLost(endpoint.island, f"{endpoint} went away before the group was built")


def _join(gathering: Gathering, given_up: threading.Event) -> dist.ProcessGroupGloo:
    """The group; blocks until all have come. Raises DeadlineError."""
    endpoints = gathering.endpoints
    rank = endpoints.index(gathering.me)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=gathering.listen_host)]
    options._timeout = timedelta(seconds=gathering.seconds)
    options._threads = 1
    try:
        # A client of its own for each group: an abandoned wait must not block the next.
        store = dist.PrefixStore(gathering.prefix, _client(gathering.stores[endpoints[0]], gathering.seconds))
        store.set(f"here/{rank}", "")
        missing = _wait_for_all(store, endpoints, gathering.seconds, given_up)
        if missing:
            raise _not_built(gathering, f"{', '.join(missing)} did not join")
        return dist.ProcessGroupGloo(store, rank, len(endpoints), options)
    except RuntimeError as error:
        if isinstance(error, DeadlineError):
            raise
        raise _not_built(gathering, first_line(error)) from None


def _wait_for_all(store: dist.Store, endpoints: list[Endpoint], seconds: float, given_up: threading.Event) -> list[str]:
    """Wait here, where it can be given up: within gloo it cannot. Returns who has not come, nobody as a rule."""
    keys = [f"here/{rank}" for rank in range(len(endpoints))]
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if given_up.wait(POLL_SECONDS) or time.monotonic() > deadline:
            return [str(e) for e, key in zip(endpoints, keys, strict=True) if not store.check([key])]
    return []


def _not_built(gathering: Gathering, cause: str) -> DeadlineError:
    return DeadlineError(f"the group {gathering.prefix!r} was not built within {gathering.seconds:g} s: {cause}")


def _client(at: At, seconds: float) -> dist.TCPStore:
    return dist.TCPStore(*at, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


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


def first_line(error: BaseException) -> str:
    """An error's text without gloo's and the store's traces."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]
