"""A transport between islands that are threads of one process. Tests of faults and of parity use
it.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from outer.errors import DeadlineError, MessageError, PeerLost
from outer.identity.known_names import KnownNames
from outer.network.endpoints import MAX_PAYLOAD_BYTES, Endpoint, Lane, Tag, Traffic
from outer.network.event_loop import ChangeSignal
from outer.network.frames import HEADER_BYTES, check_payload
from outer.transports.mailbox import Mailbox


@dataclass(frozen=True)
class Parcel:
    """A payload, a call, or the reply to a call that is delivered from one island to another."""

    source: str
    to: str
    kind: str
    """"payload", the kind of the call, or that kind with "-reply"."""
    num_bytes: int
    lane: Lane
    tag: Tag | None = None
    """The tag, if the parcel is a payload."""
    status: bytes = b""
    """The first line of the reply, if the parcel is a donor's reply."""


DeliverySchedule = Callable[[Parcel, Callable[[], None]], None]
"""Function called with a parcel and a function that delivers it, at once, later, or in another
order."""


LossListener = Callable[[str], None]
"""Function called on any thread with the name of an island whose connections have broken. It may
be the listener's own."""


class Hub:
    """The network that the loopback islands of one process share. It may be used from all of their
    event loops.
    """

    def __init__(self, delivery: DeliverySchedule = lambda parcel, deliver: deliver()) -> None:
        self.lock = threading.RLock()
        self.deliver = delivery
        self.groups: dict[str, dict[Endpoint, LoopbackTransport]] = {}
        """Transports that have joined a group, by epoch and endpoint."""
        self.messengers: dict[
            str, Any
        ] = {}  # by address; their type is in outer.membership.loopback
        self.records: dict[str, dict[str, str]] = defaultdict(dict)
        """Members as JSON, by run and island."""
        self.num_changes = 0
        """Number of changes of the records so far. Code that changes a record must count it."""
        self.parsed: dict[str, Any] = {}
        """Parsed records of outer.membership.loopback, by run."""
        self.configs: dict[str, str] = {}
        self._keys: dict[str, dict[str, str]] = defaultdict(dict)
        self._names: dict[str, list[KnownNames]] = defaultdict(list)
        self._listeners: list[LossListener] = []
        self._lost: set[str] = set()

    def introduce(self, run_id: str, island: str, key: str, names: KnownNames) -> None:
        """Exchange public keys between the islands of a run. Threads of one process need not
        prove them.
        """
        with self.lock:
            keys = self._keys[run_id]
            known = self._names[run_id]
            keys[island] = key
            for each in known:
                each.adopt({island: key})
            names.adopt(keys)
            known.append(names)

    def lose(self, island: str) -> None:
        """Break all connections of an island, as if its machine had failed."""
        with self.lock:
            self._lost.add(island)
            for records in self.records.values():
                records.pop(island, None)
            self.num_changes += 1
            listeners = list(self._listeners)
        for listener in listeners:
            listener(island)

    def heal(self, island: str) -> None:
        with self.lock:
            self._lost.discard(island)

    def is_cut(self, island: str, other: str) -> bool:
        with self.lock:
            return bool({island, other} & self._lost)

    def add_listener(self, listener: LossListener) -> None:
        with self.lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: LossListener) -> None:
        with self.lock:
            self._listeners = [other for other in self._listeners if other != listener]


def call_on_loop(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
    """Run `action` on an event loop, from any thread. Does nothing if the loop is closed."""
    with suppress(RuntimeError):  # raised by a closed loop
        loop.call_soon_threadsafe(action)


class LoopbackTransport:
    """A Transport (outer.transports.base) over a Hub."""

    is_uneven = False

    def __init__(self, hub: Hub, run_id: str, me: Endpoint, connect_seconds: float) -> None:
        self.traffic = Traffic()
        self.address = f"loopback:{me}"
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self._hub = hub
        self._run_id = run_id
        self._me = me
        self._connect_seconds = connect_seconds
        self._loop = asyncio.get_running_loop()
        self._epoch = ""
        self._others: list[Endpoint] = []
        self._ranks_of: dict[str, tuple[Endpoint, ...]] = {}
        """The ranks of each other island, which are adjacent in `_others`."""
        self._mailbox = Mailbox([])
        self._changed = ChangeSignal()
        hub.add_listener(self._on_lost)

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.disconnect()
        self._epoch = f"{self._run_id}/{epoch}"
        self._others = [e for e in addresses if e.island != self._me.island]
        self._ranks_of = {
            name: tuple(ranks) for name, ranks in groupby(self._others, key=lambda e: e.island)
        }
        self._mailbox = Mailbox(self._others)
        for other in self._others:
            if self._hub.is_cut(self._me.island, other.island):
                self._fail(other, "its connection is broken")
        with self._hub.lock:
            self._hub.groups.setdefault(self._epoch, {})[self._me] = self
            group = self._group
            complete = [each for each in self._joined() if len(group) > len(each._others)]
        for transport in complete:
            call_on_loop(transport._loop, transport._changed.notify)
        try:
            async with asyncio.timeout(self._connect_seconds):
                await self._changed.wait_until(self._has_all)
        except TimeoutError:
            missing = ", ".join(str(other) for other in self._missing())
            raise DeadlineError(
                f"{missing} did not join within {self._connect_seconds:g} s"
            ) from None

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        copy = check_payload(payload).clone()
        if error := self._mailbox.failure_of(to):
            raise error
        target = self._group.get(to)
        if target is None:
            raise PeerLost(to.island, f"{to} is not in this group")
        self.traffic.bytes_sent += HEADER_BYTES + copy.numel()
        epoch = self._epoch
        me = self._me
        parcel = Parcel(me.island, to.island, "payload", HEADER_BYTES + copy.numel(), "bulk", tag)
        self._hub.deliver(
            parcel,
            lambda: call_on_loop(target._loop, lambda: target._receive(epoch, me, tag, copy)),
        )

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        return await self._mailbox.get(source, tag, num_bytes)

    async def disconnect(self) -> None:
        with self._hub.lock:
            epoch = self._epoch
            joined = self._joined()
            self._group.pop(self._me, None)
            if not self._group:
                self._hub.groups.pop(epoch, None)
        self._mailbox.fail_all("this group was left")
        self._epoch = ""
        self._others = []
        self._ranks_of = {}
        for transport in joined:
            call_on_loop(transport._loop, lambda t=transport: t._on_goodbye(epoch, self._me))

    async def close(self) -> None:
        await self.disconnect()
        self._hub.remove_listener(self._on_lost)

    def _on_lost(self, island: str) -> None:
        if island == self._me.island or island in self._ranks_of:
            call_on_loop(self._loop, lambda: self._break(island))

    @property
    def _group(self) -> "dict[Endpoint, LoopbackTransport]":
        """The transports that have joined this one's group."""
        return self._hub.groups.get(self._epoch, {})

    def _joined(self) -> "list[LoopbackTransport]":
        group = self._group
        return [group[other] for other in self._others if other in group]

    def _has_all(self) -> bool:
        self._mailbox.raise_failure(self._others)
        with self._hub.lock:
            may_be_complete = len(self._group) > len(self._others)
        return (
            may_be_complete and not self._missing()
        )  # Called each time an island joins, so usually some are missing.

    def _missing(self) -> list[Endpoint]:
        with self._hub.lock:
            group = self._group
            return [other for other in self._others if other not in group]

    def _receive(self, epoch: str, source: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        if epoch != self._epoch or self._mailbox.failure_of(source):
            return
        self.traffic.bytes_received += HEADER_BYTES + payload.numel()
        try:
            self._mailbox.put(source, tag, payload)
        except MessageError as error:
            self._mailbox.fail(source, error)

    def _on_goodbye(self, epoch: str, source: Endpoint) -> None:
        if epoch == self._epoch:
            self._fail(source, "it left the group")

    def _break(self, island: str) -> None:
        lost = self._others if island == self._me.island else self._ranks_of.get(island, ())
        for other in lost:
            self._fail(other, "its connection is broken")

    def _fail(self, other: Endpoint, cause: str) -> None:
        self._mailbox.fail(other, PeerLost(other.island, cause))
        self._changed.notify()
