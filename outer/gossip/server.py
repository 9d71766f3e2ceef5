"""What the islands of a gossip group say and give to one another, each pair by itself.

    meet  {round}           leader    "are you there, too?"      here, and who carries what | not yet | past | apart
    take  {round, part}     carrier   "give me your part"        its payload
    tell  {round, has_all}  leader    "I have all of yours"      yes, I have all of yours | no | open

A pair counts when each has all that the other gives, and knows it of the other. An answer that is not there yet is
waited for HOLD_SECONDS and asked for again: a partner that dies or freezes is noticed by a call that fails, while one
that still trains may take as long as a round.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field

from outer.errors import MessageError, TransportError
from outer.membership.base import Messenger
from outer.rounds import MAX_ROUND, Message, pack_carriers, parse
from outer.transports.base import Endpoint

HOLD_SECONDS = 1.0
"""Less than any deadline of a call."""


class Meet(Message):
    """Is the asked island in this round, and in one group with the asking one?"""

    round: int = Field(ge=0, lt=MAX_ROUND)


class Place(Message):
    """Where the asked island is."""

    status: Literal["here", "not yet", "past", "apart"]
    round: int = Field(ge=0, lt=MAX_ROUND)
    carriers: list[list[int]] = Field(default=[], max_length=1 << 20)
    """Carrier rank of each part, run-length coded: [rank, number of parts]."""


class Take(Message):
    """A part of what the asked island gives to a round."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    part: int = Field(ge=0)


class Tell(Message):
    """Whether the asking island has all that the asked one gives."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    has_all: bool


class Word(Message):
    """Whether the asked island has all that the asking one gives; open: it does not know yet."""

    status: Literal["yes", "no", "open"]


@dataclass(frozen=True)
class Offer:
    """What this rank gives to a round, and to whom."""

    round: int
    partners: frozenset[str]
    payloads: Mapping[int, torch.Tensor]
    """By carried part, 1-D uint8."""


class Desk:
    """One rank's answers. State lives on the event loop, and so do all calls."""

    def __init__(self, messenger: Messenger, carriers: Sequence[int]) -> None:
        self._round = 0
        """Rounds behind this island."""
        self._offer: Offer | None = None
        self._own: Mapping[str, bool] = {}
        self.theirs: dict[str, bool] = {}
        """By partner: whether it has all that this island gives, as far as it has said."""
        self._carriers = [list(pair) for pair in pack_carriers(carriers)]
        self._changed = asyncio.Event()
        messenger.serve("meet", self._on_meet)
        messenger.serve("take", self._on_take)
        messenger.serve("tell", self._on_tell)

    async def open(self, offer: Offer) -> None:
        """This rank is at the end of the round's inner steps."""
        self._round, self._offer, self._own, self.theirs = offer.round, offer, {}, {}
        self._change()

    async def judge(self, has_all: Mapping[str, bool]) -> None:
        """Of each partner: whether this island, all its ranks together, has all that it gives."""
        self._own = dict(has_all)
        self._change()

    async def close(self, round_number: int) -> None:
        """This island is in another round now, and gives nothing yet."""
        self._round, self._offer = round_number, None
        self._change()

    async def _on_meet(self, source: Endpoint, body: bytes) -> bytes:
        wanted = parse(Meet, body).round
        await self._until(lambda: self._is_past(wanted) or self._offer_of(wanted) is not None)
        offer = self._offer_of(wanted)
        if offer is None:
            place = Place(status="past" if self._is_past(wanted) else "not yet", round=self._round)
        elif source.island not in offer.partners:
            place = Place(status="apart", round=self._round)
        else:
            place = Place(status="here", round=self._round, carriers=self._carriers)
        return place.model_dump_json().encode()

    async def _on_take(self, source: Endpoint, body: bytes) -> bytes:
        wanted = parse(Take, body)
        # The leader may have come to the end of the round before this rank.
        await self._until(lambda: self._is_past(wanted.round) or self._offer_of(wanted.round) is not None)
        offer = self._offer_of(wanted.round)
        if offer is None:
            raise TransportError(f"it gives nothing to round {wanted.round} now")
        if source.island not in offer.partners or wanted.part not in offer.payloads:
            raise MessageError(f"part {wanted.part} of round {wanted.round} is not given to {source.island!r} here")
        return await asyncio.to_thread(lambda: offer.payloads[wanted.part].numpy().tobytes())

    async def _on_tell(self, source: Endpoint, body: bytes) -> bytes:
        told, island = parse(Tell, body), source.island
        offer = self._offer_of(told.round)
        if offer is None or island not in offer.partners:
            return Word(status="no").model_dump_json().encode()
        self.theirs[island] = told.has_all
        self._change()
        await self._until(lambda: self._offer is not offer or island in self._own)
        known = self._own.get(island) if self._offer is offer else False
        return Word(status="open" if known is None else "yes" if known else "no").model_dump_json().encode()

    def _is_past(self, round_number: int) -> bool:
        return self._round > round_number

    def _offer_of(self, round_number: int) -> Offer | None:
        return self._offer if self._offer is not None and self._offer.round == round_number else None

    async def _until(self, claim: Callable[[], bool]) -> None:
        """Return when the claim holds, or after HOLD_SECONDS."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_SECONDS):
                while not claim():
                    await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
