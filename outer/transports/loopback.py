"""Islands as threads of one process: payloads handed over in memory. What faults and parity are tested with."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import torch

from outer.errors import DeadlineError, MessageError, PeerLost
from outer.transports.base import Endpoint, Tag, Traffic
from outer.transports.mailbox import Mailbox
from outer.wire import HEADER_BYTES, checked

Delivery = Callable[[Callable[[], None]], None]
"""Called with each message's delivery, to be run at once, later, or in another order."""


class Party(Protocol):
    """Something of an island that hears when connections break. Its methods may be called on any thread."""

    island: str

    def on_lost(self, island: str) -> None: ...


class Hub:
    """The network that loopback islands of one process share. Safe to use from all their event loops."""

    def __init__(self, delivery: Delivery = lambda deliver: deliver()) -> None:
        self.lock = threading.RLock()
        self.deliver = delivery
        self.transports: dict[tuple[str, Endpoint], LoopbackTransport] = {}
        """By epoch and endpoint: who has joined a group."""
        self.messengers: dict[str, Party] = {}
        """By address."""
        self.records: dict[str, dict[str, str]] = {}
        """By run and island: Member as JSON."""
        self.configs: dict[str, str] = {}
        """By run."""
        self._parties: list[Party] = []
        self._lost: set[str] = set()

    def lose(self, island: str) -> None:
        """Break all connections of an island, as if its machine had died."""
        with self.lock:
            self._lost.add(island)
            for records in self.records.values():
                records.pop(island, None)
            parties = list(self._parties)
        for party in parties:
            party.on_lost(island)

    def heal(self, island: str) -> None:
        """Let a lost island connect again."""
        with self.lock:
            self._lost.discard(island)

    def is_cut(self, island: str, other: str) -> bool:
        """Whether nothing passes between these two."""
        with self.lock:
            return bool({island, other} & self._lost)

    def enter(self, party: Party) -> None:
        """Tell `party` of losses from now on."""
        with self.lock:
            self._parties.append(party)

    def exit(self, party: Party) -> None:
        """Tell it no more. Idempotent."""
        with self.lock:
            self._parties = [p for p in self._parties if p is not party]


class LoopbackTransport:
    """See outer.transports.base.Transport."""

    def __init__(self, hub: Hub, run_id: str, me: Endpoint, connect_seconds: float) -> None:
        self.traffic = Traffic()
        self.island = me.island
        self._hub, self._run_id, self._me, self._connect_seconds = hub, run_id, me, connect_seconds
        self._loop = asyncio.get_running_loop()
        self._epoch: str | None = None
        self._others: list[Endpoint] = []
        self._mailbox = Mailbox([])
        self._changed = asyncio.Event()
        hub.enter(self)

    @property
    def address(self) -> str:
        return f"loopback:{self._me}"

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.disconnect()
        self._epoch = f"{self._run_id}/{epoch}"
        self._others = [e for e in addresses if e.island != self._me.island]
        self._mailbox = Mailbox(self._others)
        for other in self._others:
            if self._hub.is_cut(self._me.island, other.island):
                self._fail(other, "its connection is broken")
        with self._hub.lock:
            self._hub.transports[self._epoch, self._me] = self
            joined = [self._hub.transports.get((self._epoch, other)) for other in self._others]
        for transport in joined:
            if transport is not None:
                transport.on_loop(transport._changed.set)
        try:
            async with asyncio.timeout(self._connect_seconds):
                await self._wait_for_all()
        except TimeoutError:
            missing = ", ".join(str(other) for other in self._missing())
            raise DeadlineError(f"{missing} did not join within {self._connect_seconds:g} s") from None

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        copy = checked(payload).clone()
        if error := self._mailbox.failure_of(to):
            raise error
        target = self._hub.transports.get((self._epoch or "", to))
        if target is None:
            raise PeerLost(to.island, f"{to} is not in this group")
        self.traffic.bytes_sent += HEADER_BYTES + copy.numel()
        epoch, me = self._epoch, self._me
        self._hub.deliver(lambda: target.on_loop(lambda: target._take_in(epoch, me, tag, copy)))

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        return await self._mailbox.get(source, tag, num_bytes)

    async def disconnect(self) -> None:
        with self._hub.lock:
            epoch = self._epoch
            self._hub.transports.pop((epoch or "", self._me), None)
            joined = [self._hub.transports.get((epoch or "", other)) for other in self._others]
        self._mailbox.fail_all("this group was left")
        self._epoch, self._others = None, []
        for transport in joined:
            if transport is not None:
                transport.on_loop(lambda t=transport: t._hear_goodbye(epoch, self._me))

    async def close(self) -> None:
        await self.disconnect()
        self._hub.exit(self)

    def on_lost(self, island: str) -> None:
        """Called by the hub, on any thread: this island, or one that it talks to, is cut off."""
        self.on_loop(lambda: self._break(island))

    def on_loop(self, action: Callable[[], None]) -> None:
        """Run `action` on this transport's event loop; nothing if that has ended."""
        with suppress(RuntimeError):  # raised by a closed loop
            self._loop.call_soon_threadsafe(action)

    async def _wait_for_all(self) -> None:
        while True:
            for other in self._others:
                if error := self._mailbox.failure_of(other):
                    raise error
            if not self._missing():
                return
            self._changed.clear()
            await self._changed.wait()

    def _missing(self) -> list[Endpoint]:
        with self._hub.lock:
            return [other for other in self._others if (self._epoch or "", other) not in self._hub.transports]

    def _take_in(self, epoch: str | None, source: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        if epoch != self._epoch or self._mailbox.failure_of(source):
            return
        self.traffic.bytes_received += HEADER_BYTES + payload.numel()
        try:
            self._mailbox.put(source, tag, payload)
        except MessageError as error:
            self._mailbox.fail(source, error)

    def _hear_goodbye(self, epoch: str | None, source: Endpoint) -> None:
        if epoch == self._epoch:
            self._fail(source, "it left the group")

    def _break(self, island: str) -> None:
        for other in self._others:
            if island in (self._me.island, other.island):
                self._fail(other, "its connection is broken")

    def _fail(self, other: Endpoint, cause: str) -> None:
        self._mailbox.fail(other, PeerLost(other.island, cause))
        self._changed.set()
