"""The serving side of gossip: this island's replies to its partners. Each pair of islands decides
for itself.

    meet {round}          leader   "are you in this round?" here, carriers | not yet | past | apart
    take {round, part}    carrier  "give me your part"      its payload
    tell {round, has_all} leader   "I have all of yours"    so have I | no | open

A pair counts when each island has the other's whole share and knows that the other has its own. An
answer that is not known yet is delayed for HOLD_SECONDS and then requested again: a partner that
dies or freezes makes the call fail, while one that is still training may take as long as a round.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field

from outer.errors import MessageError, TransportError
from outer.network.endpoints import Endpoint, Messenger
from outer.network.event_loop import ChangeSignal
from outer.network.messages import MAX_ROUND, Carriers, Message, PartNumber, pack_carriers, receive

HOLD_SECONDS = 1.0
"""How long an answer is delayed. It is shorter than any deadline of a call."""


class Meet(Message):
    """Asks whether an island is in this round and in the same group as the sender."""

    round: int = Field(ge=0, lt=MAX_ROUND)


class MeetReply(Message):
    """The answer to `Meet`."""

    status: Literal["here", "not yet", "past", "apart"]
    round: int = Field(ge=0, lt=MAX_ROUND)
    carriers: Carriers = Field(default=[])


class Take(Message):
    """Asks for one part of an island's share."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    part: PartNumber


class Tell(Message):
    """Reports whether the sender has the receiver's whole share, and asks for the receiver's
    report in return.
    """

    round: int = Field(ge=0, lt=MAX_ROUND)
    has_all: bool


class TellReply(Message):
    """The answer to `Tell`: whether this island has the sender's whole share, or "open" if it
    does not know yet.
    """

    status: Literal["yes", "no", "open"]


@dataclass(frozen=True)
class PublishedShare:
    """This rank's share of a round, and the partners that may fetch it."""

    round: int
    partners: frozenset[str]
    payloads: Mapping[int, torch.Tensor]
    """Payloads (1-D uint8) by carried part."""


class GossipServer:
    """Answers the calls of one rank. All methods run on the event loop, which owns the state."""

    def __init__(self, messenger: Messenger, carriers: Sequence[int]) -> None:
        self._round = 0
        """Number of rounds that this island has completed."""
        self._share: PublishedShare | None = None
        self._own: Mapping[str, bool] = {}
        self.theirs: dict[str, bool] = {}
        """Whether each partner has this island's whole share, by partner, as far as partners
        have reported it."""
        self._carriers = pack_carriers(carriers)
        self._changed = ChangeSignal()
        messenger.serve("meet", self._on_meet)
        messenger.serve("take", self._on_take)
        messenger.serve("tell", self._on_tell)

    async def publish(self, share: PublishedShare) -> None:
        """Serve this share from now on: the rank has reached the end of the round's inner steps."""
        self._round = share.round
        self._share = share
        self._own = {}
        self.theirs = {}
        self._changed.notify()

    async def judge(self, has_all: Mapping[str, bool]) -> None:
        """Set whether this island, over all its ranks, has the whole share of each partner."""
        self._own = dict(has_all)
        self._changed.notify()

    async def close(self, round_number: int) -> None:
        """Enter this round without a published share."""
        self._round = round_number
        self._share = None
        self._changed.notify()

    async def _on_meet(self, source: Endpoint, body: bytes) -> bytes:
        wanted = (await receive(Meet, body)).round
        await self._changed.wait_until(
            lambda: self._is_past(wanted) or self._find_share(wanted) is not None, HOLD_SECONDS
        )
        share = self._find_share(wanted)
        if share is None:
            reply = MeetReply(
                status="past" if self._is_past(wanted) else "not yet", round=self._round
            )
        elif source.island not in share.partners:
            reply = MeetReply(status="apart", round=self._round)
        else:
            reply = MeetReply(status="here", round=self._round, carriers=self._carriers)
        return reply.encode()

    async def _on_take(self, source: Endpoint, body: bytes) -> bytes:
        wanted = await receive(Take, body)
        # The leader may have reached the end of the round before this rank.
        await self._changed.wait_until(
            lambda: self._is_past(wanted.round) or self._find_share(wanted.round) is not None,
            HOLD_SECONDS,
        )
        share = self._find_share(wanted.round)
        if share is None:
            raise TransportError(f"it has no share for round {wanted.round} now")
        if source.island not in share.partners or wanted.part not in share.payloads:
            raise MessageError(
                f"part {wanted.part} of round {wanted.round} is not for {source.island!r}"
            )
        return await asyncio.to_thread(lambda: share.payloads[wanted.part].numpy().tobytes())

    async def _on_tell(self, source: Endpoint, body: bytes) -> bytes:
        word = await receive(Tell, body)
        island = source.island
        share = self._find_share(word.round)
        if share is None or island not in share.partners:
            return TellReply(status="no").encode()
        self.theirs[island] = word.has_all
        self._changed.notify()
        await self._changed.wait_until(
            lambda: self._share is not share or island in self._own, HOLD_SECONDS
        )
        known = self._own.get(island) if self._share is share else False
        return TellReply(status="open" if known is None else "yes" if known else "no").encode()

    async def _wait_for(self, round_number: int) -> None:
        """Wait up to HOLD_SECONDS until the share of this round is published or the round is
        past.
        """

        def is_decided() -> bool:
            return self._is_past(round_number) or self._find_share(round_number) is not None

        await self._changed.wait_until(is_decided, HOLD_SECONDS)

    def _is_past(self, round_number: int) -> bool:
        return self._round > round_number

    def _find_share(self, round_number: int) -> PublishedShare | None:
        return (
            self._share if self._share is not None and self._share.round == round_number else None
        )
