"""The side of a state transfer that gives: parts of the state, and the means that bring older parts up to date.

    state {round}         description of that round, or of the newest       (control lane, leader)
    part  {part, ...}     params and momentum as they are now               (bulk lane, each rank: what it carries)
    mean  {part, round}   the encoded mean that led from round to round + 1
    taken {worker}        the worker has got all that it asked for          (control lane)

A donor keeps no snapshot and waits for nobody: rounds go on while parts leave, each of the round it leaves in.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from outer.deadlines import Deadlines
from outer.errors import TransportError
from outer.membership.base import Messenger
from outer.phases import NO_HOOKS, Hooks
from outer.rounds import MAX_ROUND, Message, pack_carriers, parse
from outer.state import GlobalState, Position
from outer.transports.base import Endpoint

ROUNDS_DESCRIBED = 16
PARTS_SERVED_AT_ONCE = 4
"""Per rank, over all joiners; one while a round is being reduced."""
MAX_WORKERS = 64
GATE_SECONDS = 3.0
"""A caller is told to come again before its own deadline can run out."""
TAKE_SECONDS = 120.0
"""For a part to arrive, before that has been measured."""

Status = Literal["part", "mean", "busy", "behind", "gone"]
"""The line that a reply begins with. behind: this island has not come to that round; gone: the mean is not kept."""
Caller = tuple[Endpoint, int]
"""A joiner's rank, and which of its workers. A worker asks for one thing at a time."""


class Description(Message):
    """What a donor says of its state after a round."""

    digest: str = Field(pattern=r"^[0-9a-f]{16,64}$")
    """Of params, momentum and the position's account; the joiner must find the same."""
    position: Position
    fingerprint: str = Field(pattern=r"^[0-9a-f]{16,64}$")
    """Of the canonical space."""
    carriers: list[list[int]] = Field(max_length=1 << 20)
    included: list[Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]] = Field(default=[], max_length=1024)
    """Incarnations whose progress the commit of this round contains."""


class StateRequest(Message):
    """Which round is to be described; None: the newest."""

    round: int | None = Field(default=None, ge=0, lt=MAX_ROUND)


class PartRequest(Message):
    """A part, at this round or a later one."""

    part: int
    at_least: int = Field(default=0, ge=0, lt=MAX_ROUND)
    worker: int = Field(default=0, ge=0, lt=MAX_WORKERS)
    """Whose earlier request is answered in full by now: its place is free again."""


class MeanRequest(Message):
    """The encoded mean of a part that led from this round to the next."""

    part: int
    round: int = Field(ge=0, lt=MAX_ROUND)
    worker: int = Field(default=0, ge=0, lt=MAX_WORKERS)


class TakenRequest(Message):
    """The worker asks for nothing for now: its place is free. None: all of the caller's."""

    worker: int | None = Field(default=None, ge=0, lt=MAX_WORKERS)


class Donor:
    """Serves this rank's parts; on the leader also their descriptions. A fresh island is never a donor."""

    def __init__(self, state: GlobalState, messenger: Messenger, hooks: Hooks = NO_HOOKS) -> None:
        self.is_busy = False
        """A round is being reduced; set by whoever runs it."""
        self._state, self._hooks = state, hooks
        self._described: dict[int, bytes] = {}
        self._num_replaced = state.num_replaced
        self._gate = Gate(lambda: 1 if self.is_busy else PARTS_SERVED_AT_ONCE)
        messenger.serve("state", self._on_state)
        messenger.serve("part", self._on_part)
        messenger.serve("mean", self._on_mean)
        messenger.serve("taken", self._on_taken)

    def describe(self, digest: str, carriers: Sequence[int], fingerprint: str, included: Sequence[str] = ()) -> None:
        """Say what joiners will find; call it on the leader after each commit and each `replace`."""
        position = self._state.position
        if position.round == 0:
            return
        description = Description(
            digest=digest,
            position=position,
            fingerprint=fingerprint,
            carriers=[list(pair) for pair in pack_carriers(carriers)],
            included=list(included),
        )
        # Rounds before a replaced state may belong to another history.
        known = self._described if self._num_replaced == self._state.num_replaced else {}
        self._num_replaced = self._state.num_replaced
        oldest = position.round - ROUNDS_DESCRIBED
        kept = {r: text for r, text in known.items() if oldest < r < position.round}
        # A new dict at once: the event loop reads it meanwhile.
        self._described = kept | {position.round: description.model_dump_json().encode()}

    async def _on_state(self, source: Endpoint, body: bytes) -> bytes:
        known = self._described
        if not known:
            raise TransportError("this island has committed no round: it cannot be a donor")
        wanted = parse(StateRequest, body).round
        if wanted is not None and wanted not in known:
            raise TransportError(f"round {wanted} is not known here; rounds {min(known)} to {max(known)} are")
        return known[max(known) if wanted is None else wanted]

    async def _on_part(self, source: Endpoint, body: bytes) -> bytes:
        request = parse(PartRequest, body)
        return await self._serve((source, request.worker), partial(self._part, request))

    async def _on_mean(self, source: Endpoint, body: bytes) -> bytes:
        request = parse(MeanRequest, body)
        return await self._serve((source, request.worker), partial(self._mean, request))

    async def _on_taken(self, source: Endpoint, body: bytes) -> bytes:
        worker = parse(TakenRequest, body).worker
        if worker is None:
            self._gate.leave_all(source)
        else:
            self._gate.leave((source, worker))
        return b""

    async def _serve(self, caller: Caller, read: Callable[[], tuple[Status, bytes]]) -> bytes:
        if self._state.position.round == 0:
            raise TransportError("this island has committed no round: it cannot be a donor")
        if not self._gate.knows(caller[0].island):
            self._hooks.reached("donate", self._state.position.round)
        if not await self._gate.enter(caller):
            return b"busy\n"
        body = b""
        try:
            status, body = await asyncio.to_thread(read)
            return status.encode() + b"\n" + body
        finally:
            if not body:
                self._gate.leave(caller)

    def _part(self, request: PartRequest) -> tuple[Status, bytes]:
        if self._state.position.round < request.at_least:
            return "behind", b""
        return "part", self._state.pack(request.part)

    def _mean(self, request: MeanRequest) -> tuple[Status, bytes]:
        if self._state.position.round <= request.round:
            return "behind", b""
        payload = self._state.mean(request.part, request.round)
        return ("gone", b"") if payload is None else ("mean", payload)


class Gate:
    """Lets a few parts be under way at a time, fairly between islands. On one event loop.

    A part is under way until its caller asks for the next: only then has the link carried it. A caller that has died
    keeps its place for as long as a part may take.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._since: dict[Caller, float] = {}
        """Who has a place, and since when."""
        self._waiting: dict[Caller, asyncio.Future[bool]] = {}
        self._deadlines = Deadlines(TAKE_SECONDS)

    async def enter(self, caller: Caller) -> bool:
        """Whether there was a place within GATE_SECONDS; the caller's earlier place is given up."""
        if caller in self._since:
            self._deadlines.observe("part", time.monotonic() - self._since[caller])
            self.leave(caller)
        replaced = self._waiting.pop(caller, None)
        if replaced is not None and not replaced.done():
            replaced.set_result(False)
        turn = self._waiting[caller] = asyncio.get_running_loop().create_future()
        self._lend()
        try:
            async with asyncio.timeout(GATE_SECONDS):
                return await turn
        except TimeoutError:
            return False
        finally:
            if self._waiting.get(caller) is turn:
                del self._waiting[caller]

    def leave(self, caller: Caller) -> None:
        """Free the caller's place. Idempotent."""
        self._since.pop(caller, None)
        self._lend()

    def leave_all(self, source: Endpoint) -> None:
        """Free the places of all workers of a joiner's rank."""
        for caller in [c for c in self._since if c[0] == source]:
            self.leave(caller)

    def knows(self, island: str) -> bool:
        """Whether the island has a place, or waits for one."""
        return any(source.island == island for source, _ in [*self._since, *self._waiting])

    def _lend(self) -> None:
        """Give free places to those who wait: of the islands that have the fewest, the one that came first."""
        oldest = time.monotonic() - self._deadlines.limit("part")
        self._since = {caller: since for caller, since in self._since.items() if since > oldest}
        while self._waiting and len(self._since) < self._limit():
            caller = min(self._waiting, key=lambda c: sum(c[0].island == held.island for held, _ in self._since))
            turn = self._waiting.pop(caller)
            if not turn.done():
                self._since[caller] = time.monotonic()
                turn.set_result(True)
