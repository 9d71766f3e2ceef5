"""Payloads over gloo: plain TCP between all endpoints, fast, unencrypted. For clusters that trust each other.

One process group spans all endpoints of an epoch; it is dropped at the first error and never used again. Its
endpoints find each other through a store that the first of them serves: nothing else has to be alive.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outer.errors import InputError, PeerLost
from outer.transports.base import Endpoint, Tag, Traffic
from outer.transports.gloo_groups import (
    Gathering,
    GroupStore,
    build_group,
    first_line,
    in_thread,
    new_thread,
    parse_address,
)
from outer.wire import checked

MAX_WAIT = timedelta(days=1)
"""Of one gloo call; the real deadline is the caller's, who then disconnects."""
PREAMBLE_BYTES = 48
"""Before each of gloo's messages; a payload takes three: sender ready, receiver ready, the payload itself."""
SENDS_IN_FLIGHT = 2
"""To each endpoint. What it may send to us it learns on the same connection, behind what is being sent already."""


class GlooTransport:
    """See outer.transports.base.Transport. It serves a store for groups as long as it is open."""

    def __init__(
        self, run_id: str, me: Endpoint, listen_host: str, announce_host: str | None, connect_seconds: float
    ) -> None:
        check_listen_host(listen_host)
        self.traffic = Traffic()
        self._run_id, self._me = run_id, me
        self._listen_host, self._connect_seconds = listen_host, connect_seconds
        self._store = GroupStore(listen_host)
        self._address = f"gloo:{me}@{announce_host or listen_host}:{self._store.at[1]}"
        self._group: Any = None  # a ProcessGroupGloo; its stubs lack send and recv
        self._ranks: dict[Endpoint, int] = {}
        self._sending: dict[Endpoint, asyncio.Semaphore] = {}
        self._waiters = _Waiters()

    @property
    def address(self) -> str:
        return self._address

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.disconnect()
        endpoints = sorted(addresses)
        stores = {endpoint: parse_address(endpoint, addresses[endpoint]) for endpoint in endpoints}
        stores[self._me] = self._store.at  # from here the announced address may lead nowhere
        prefix = f"{self._run_id}/groups/{epoch}"
        if endpoints[0] == self._me:
            await in_thread(lambda: self._store.begin(prefix))
        gathering = Gathering(prefix, self._me, stores, self._listen_host, self._connect_seconds)
        self._group = await build_group(gathering)
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
        self._store.close()

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
