"""The serving side of a state transfer: parts of the state, and the means that bring older parts up
to date.

    state {round}         description of that round, or of the newest round (control lane, on the
                          leader)
    part  {part, ...}     params and momentum of a part as they are now     (bulk lane, on the rank
          that carries it)
    mean  {part, round}   the encoded mean that led from `round` to the next (bulk lane, likewise)
    taken {worker}        the worker needs nothing more for now             (control lane)

A donor keeps no snapshot and does not wait for joiners: each part is sent at its current round.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from pydantic import Field

from outer.agreement.proofs.certificate import Claim, Proof
from outer.errors import TransportError
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint, Messenger
from outer.network.event_loop import loop_time
from outer.network.messages import (
    MAX_ROUND,
    Carriers,
    Digest,
    Incarnation,
    Message,
    PartNumber,
    pack_carriers,
    receive,
)
from outer.state.global_state import GlobalState
from outer.state.part_state import Position

ROUNDS_DESCRIBED = 16
NO_PROOF = Proof()
PARTS_SERVED_AT_ONCE = 4
"""Number of parts that a rank serves at a time, over all joiners. During a reduce it serves only
one."""
MAX_WORKERS = 64
GATE_SECONDS = 3.0
"""Longest wait for a place. It ends before the caller's own deadline, and the caller must then
ask again."""
PART_SECONDS = 120.0
"""Time limit for a part to arrive until the transfer of parts has been measured."""

ReplyStatus = Literal["part", "mean", "busy", "behind", "gone"]
"""First line of a reply. behind: this island has not reached that round; gone: the mean is no
longer kept.
"""
Caller = tuple[Endpoint, int]
"""Rank of a joiner, and the number of one of its workers. A worker makes one request at a time."""


class Description(Message):
    """Description of a donor's state after a round."""

    is_parsed_aside = True
    digest: Digest
    """Digest of params, momentum and data ledger. The joiner must compute the same one."""
    position: Position
    fingerprint: Digest
    """Fingerprint of the canonical space, which tells one model from another."""
    carriers: Carriers
    included: list[Incarnation] = Field(default=[], max_length=1024)
    """Incarnations of the islands whose progress is part of this round's commit."""
    proof: Proof = NO_PROOF
    """Proof that the state was committed. Empty in gossip, which has no commits of all islands."""

    @property
    def claim(self) -> Claim:
        """The claim in the description: the state that the donor claims to hold."""
        return Claim(self.position.round, self.position.tokens, self.digest)


class StateRequest(Message):
    """Request for the description of a round. None asks for the newest one."""

    round: int | None = Field(default=None, ge=0, lt=MAX_ROUND)


class PartRequest(Message):
    """Request for a part at round `at_least` or a later one."""

    part: PartNumber
    at_least: int = Field(default=0, ge=0, lt=MAX_ROUND)
    worker: int = Field(default=0, ge=0, lt=MAX_WORKERS)
    """Number of the requesting worker. It has received the reply to its previous request, so the
    place for that one becomes free."""


class MeanRequest(Message):
    """Request for the encoded mean that led a part from this round to the next. See PartRequest for
    `worker`.
    """

    part: PartNumber
    round: int = Field(ge=0, lt=MAX_ROUND)
    worker: int = Field(default=0, ge=0, lt=MAX_WORKERS)


class ReleaseRequest(Message):
    """Notice that a worker needs nothing for now, so its place is free. None means all workers
    of the caller.
    """

    worker: int | None = Field(default=None, ge=0, lt=MAX_WORKERS)


R = TypeVar("R", PartRequest, MeanRequest)


class Donor:
    """Serves the parts that this rank carries and, on the leader, the descriptions. Serves
    nothing before a round is committed.
    """

    def __init__(
        self,
        state: GlobalState,
        messenger: Messenger,
        on_first_request: Callable[[int], None] = lambda round_number: None,
    ) -> None:
        """Create a donor. `on_first_request` is called with this island's round when a joiner
        without a place requests a part.
        """
        self.is_busy = False
        """Whether a round is being reduced. Set by the code that runs the round."""
        self._state = state
        self._on_first_request = on_first_request
        self._descriptions: dict[int, bytes] = {}
        self._num_replaced = state.num_replaced
        self._gate = AdmissionGate(lambda: 1 if self.is_busy else PARTS_SERVED_AT_ONCE)
        messenger.serve("state", self._on_state)
        messenger.serve("part", partial(self._on_request, PartRequest, self._read_part))
        messenger.serve("mean", partial(self._on_request, MeanRequest, self._read_mean))
        messenger.serve("taken", self._on_release)

    def describe(
        self,
        digest: str,
        carriers: Sequence[int],
        fingerprint: str,
        included: Sequence[str] = (),
        proof: Proof = NO_PROOF,
    ) -> None:
        """Set the description of the current state. Call it on the leader after each commit and
        each `replace`.

        `digest`: of the state. `fingerprint`: of the canonical space. `carriers`: carrier rank of
        each part. `included`: incarnations of the islands whose progress is part of the last
        commit. `proof`: proof of that commit.
        """
        position = self._state.position
        if position.round == 0:
            return
        packed = pack_carriers(carriers)
        included = list(included)
        description = Description(
            digest=digest,
            position=position,
            fingerprint=fingerprint,
            carriers=packed,
            included=included,
            proof=proof,
        )
        # Earlier descriptions may belong to another history if the state has been replaced since
        # then.
        known = self._descriptions if self._num_replaced == self._state.num_replaced else {}
        self._num_replaced = self._state.num_replaced
        kept = {r: text for r, text in known.items() if 0 < position.round - r < ROUNDS_DESCRIBED}
        # The dict is replaced as a whole, because the event loop reads it at the same time.
        self._descriptions = kept | {position.round: description.encode()}

    async def _on_state(self, source: Endpoint, body: bytes) -> bytes:
        known = self._descriptions
        if not known:
            raise TransportError("this island has committed no round, so it cannot be a donor")
        wanted = (await receive(StateRequest, body)).round
        if wanted is not None and wanted not in known:
            raise TransportError(
                f"round {wanted} is not known here; rounds {min(known)} to {max(known)} are"
            )
        return known[max(known) if wanted is None else wanted]

    async def _on_release(self, source: Endpoint, body: bytes) -> bytes:
        worker = (await receive(ReleaseRequest, body)).worker
        for number in range(MAX_WORKERS) if worker is None else [worker]:
            self._gate.leave((source, number))
        return b""

    async def _on_request(
        self,
        model: type[R],
        read: Callable[[R], tuple[ReplyStatus, bytes]],
        source: Endpoint,
        body: bytes,
    ) -> bytes:
        request = await receive(model, body)
        caller = source, request.worker
        if self._state.position.round == 0:
            raise TransportError("this island has committed no round, so it cannot be a donor")
        if not self._gate.has_caller_from(source.island):
            self._on_first_request(self._state.position.round)
        if not await self._gate.enter(caller):
            return b"busy\n"
        body = b""
        try:
            status, body = await asyncio.to_thread(read, request)
            return status.encode() + b"\n" + body
        finally:
            if not body:
                self._gate.leave(caller)

    def _read_part(self, request: PartRequest) -> tuple[ReplyStatus, bytes]:
        if self._state.position.round < request.at_least:
            return "behind", b""
        return "part", self._state.pack(request.part)

    def _read_mean(self, request: MeanRequest) -> tuple[ReplyStatus, bytes]:
        if self._state.position.round <= request.round:
            return "behind", b""
        payload = self._state.mean(request.part, request.round)
        return ("gone", b"") if payload is None else ("mean", payload)


class AdmissionGate:
    """Limits the number of parts that are sent at a time, and shares the places fairly between
    islands.

    A caller keeps its place until its next request, because only then has the part crossed the
    link. A caller that has died keeps its place for the longest time that a part may take. All
    methods run on one event loop.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._admitted_at: dict[Caller, float] = {}
        """Callers that have a place, with the event loop's time at which they got it."""
        self._waiting: dict[Caller, asyncio.Future[bool]] = {}
        self._deadlines = Deadlines(PART_SECONDS)

    async def enter(self, caller: Caller) -> bool:
        """Release the caller's earlier place and wait up to GATE_SECONDS for a new one. Return
        whether it got one.
        """
        if caller in self._admitted_at:
            self._deadlines.observe("part", loop_time() - self._admitted_at[caller])
            self.leave(caller)
        replaced = self._waiting.pop(caller, None)
        if replaced is not None and not replaced.done():
            replaced.set_result(False)
        turn = self._waiting[caller] = asyncio.get_running_loop().create_future()
        self._admit()
        try:
            async with asyncio.timeout(GATE_SECONDS):
                return await turn
        except TimeoutError:
            return False
        finally:
            if self._waiting.get(caller) is turn:
                del self._waiting[caller]

    def leave(self, caller: Caller) -> None:
        """Release the caller's place. Idempotent."""
        self._admitted_at.pop(caller, None)
        self._admit()

    def has_caller_from(self, island: str) -> bool:
        """Return whether a caller of this island has a place or waits for one."""
        return any(source.island == island for source, _ in [*self._admitted_at, *self._waiting])

    def _admit(self) -> None:
        """Give free places to waiting callers: first to those whose island has the fewest
        places, then in order of arrival.
        """
        oldest = loop_time() - self._deadlines.limit("part")
        self._admitted_at = {caller: at for caller, at in self._admitted_at.items() if at > oldest}
        while self._waiting and len(self._admitted_at) < self._limit():
            caller = min(
                self._waiting,
                key=lambda c: sum(c[0].island == source.island for source, _ in self._admitted_at),
            )
            turn = self._waiting.pop(caller)
            if not turn.done():
                self._admitted_at[caller] = loop_time()
                turn.set_result(True)
