"""One round, decided: what islands tell one another and what follows from it. Pure; no sockets, no clocks.

    Ready  -> every other island     "my inner steps of round r are done; this is my state's digest"
    Plan   -> its participants       "attempt a of round r is made by these islands, in this order"
    Vote   -> its participants       "I have the result, this is its digest" or "I have not"

All votes yes and all digests equal: everybody commits. Any no: everybody aborts, and nobody has changed anything.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from outer.errors import MessageError
from outer.transports.base import Endpoint

MAX_RANKS = 4096
MAX_ROUND = 1 << 30
Name = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")


class Message(BaseModel):
    """Base of what comes from a peer: checked strictly, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Ready(Message):
    """An island has done its inner steps of `round` and could take part in a plan."""

    island: str = Name
    incarnation: str = Field(pattern=r"^[0-9a-f]{8,32}$")
    round: int = Field(ge=0, lt=MAX_ROUND)
    tokens: int = Field(ge=0, lt=1 << 53)
    """Trained since the global params of this round; the island's weight in the mean."""
    digest: str = Field(pattern=r"^[0-9a-f]{16,64}$")
    """Of the global params and outer momentum that the inner steps began from."""
    carriers: list[tuple[int, int]] = Field(max_length=1 << 20)
    """Carrier rank of each part, run-length coded: (rank, number of parts)."""
    epoch: str = Field(default="", max_length=96, pattern=r"^[A-Za-z0-9._-]*$")
    """The transport group that the island's ranks are still connected in; empty: none."""
    transport_addresses: list[str] = Field(min_length=1, max_length=MAX_RANKS)
    control_addresses: list[str] = Field(min_length=1, max_length=MAX_RANKS)

    @field_validator("carriers", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        # JSON has no tuples; strict validation would refuse its lists.
        return [tuple(pair) if isinstance(pair, list) else pair for pair in value] if isinstance(value, list) else value

    def check(self, num_parts: int) -> None:
        """Raise MessageError unless every part has a carrier, and every rank two addresses."""
        if len(self.control_addresses) != len(self.transport_addresses):
            raise MessageError(f"island {self.island!r} gives its ranks unequal numbers of addresses")
        check_carriers(self.carriers, num_parts, len(self.transport_addresses))

    @property
    def endpoints(self) -> dict[Endpoint, str]:
        """Every endpoint of the island with its transport address."""
        return {Endpoint(self.island, rank): a for rank, a in enumerate(self.transport_addresses)}


class Plan(Message):
    """One attempt at a round, fixed: who takes part, in which order."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    attempt: int = Field(ge=0, lt=1 << 20)
    planner: str = Name
    participants: list[Ready] = Field(min_length=1, max_length=1024)

    @property
    def names(self) -> list[str]:
        """The participants in the order in which their pseudo-gradients are summed."""
        return [p.island for p in self.participants]

    @property
    def key(self) -> tuple[int, int]:
        return self.round, self.attempt

    @property
    def addresses(self) -> dict[Endpoint, str]:
        """Every endpoint of every participant with its transport address."""
        return {e: a for p in self.participants for e, a in p.endpoints.items()}


class Vote(Message):
    """What an island has to say of an attempt after the reduce."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    attempt: int = Field(ge=0, lt=1 << 20)
    island: str = Name
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{16,64}$")
    """Of the reduced mean; None: the reduce failed here."""
    cause: str = Field(default="", max_length=2000)

    @property
    def key(self) -> tuple[int, int]:
        return self.round, self.attempt


class Standing(Message):
    """The answer to a ready: the round that the asked island is in."""

    round: int = Field(ge=0, lt=MAX_ROUND)


class Question(Message):
    """What came of this attempt?"""

    round: int = Field(ge=0, lt=MAX_ROUND)
    attempt: int = Field(ge=0, lt=1 << 20)

    @property
    def key(self) -> tuple[int, int]:
        return self.round, self.attempt


Outcome = Literal["commit", "abort", "open"]
M = TypeVar("M", bound=Message)


def parse(model: type[M], body: bytes) -> M:
    """The message in a peer's bytes. Raises MessageError when they are not one."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MessageError(f"not a {model.__name__}: {where}: {first['msg']}") from None


def majority(readies: Collection[Ready]) -> str:
    """The digest that most of these islands hold; among equals, that of the island first by name."""
    counts = Counter(r.digest for r in readies)
    return max(sorted(readies, key=lambda r: r.island), key=lambda r: counts[r.digest]).digest


def make_plan(planner: str, attempt: int, readies: Mapping[str, Ready]) -> Plan:
    """The next attempt by the islands that hold the majority's state, ordered by name."""
    digest = majority(readies.values())
    agreed = sorted((r for r in readies.values() if r.digest == digest), key=lambda r: r.island)
    return Plan(round=agreed[0].round, attempt=attempt, planner=planner, participants=agreed)


def tally(plan: Plan, votes: Mapping[str, Vote]) -> Outcome:
    """What the votes say: one no, or two digests, abort; all yes commit; otherwise still open."""
    cast = [votes[name] for name in plan.names if name in votes]
    if any(v.digest is None for v in cast) or len({v.digest for v in cast}) > 1:
        return "abort"
    return "commit" if len(cast) == len(plan.names) else "open"


def check_plan(plan: Plan, own: Ready, last_attempt: int, num_parts: int) -> None:
    """Raise MessageError unless this island can take part: its own ready in it, a new attempt, sound carriers."""
    if plan.round != own.round:
        raise MessageError(f"plan for round {plan.round}, this island is in round {own.round}")
    if plan.attempt <= last_attempt:
        raise MessageError(f"plan for attempt {plan.attempt}, attempt {last_attempt} has been accepted")
    if plan.names != sorted(set(plan.names)):
        raise MessageError("plan with participants repeated or out of order")
    if own not in plan.participants:
        raise MessageError(f"plan without {own.island!r} as it is now")
    for participant in plan.participants:
        participant.check(num_parts)
        if participant.digest != own.digest:
            raise MessageError(f"plan with {participant.island!r}, whose state differs from this island's")


def check_carriers(packed: Sequence[tuple[int, int]], num_parts: int, num_ranks: int) -> None:
    """Raise MessageError unless every part has a carrier among the ranks."""
    counts = [count for _, count in packed]
    if sum(counts) != num_parts or min(counts, default=1) < 1 or not all(0 <= r < num_ranks for r, _ in packed):
        raise MessageError(f"the carriers given do not cover {num_parts} parts with {num_ranks} ranks")


def pack_carriers(carriers: Sequence[int]) -> list[tuple[int, int]]:
    """[0, 0, 0, 1, 1] -> [(0, 3), (1, 2)]"""
    return [(rank, len(list(run))) for rank, run in groupby(carriers)]


def unpack_carriers(packed: Sequence[tuple[int, int]]) -> list[int]:
    """[(0, 3), (1, 2)] -> [0, 0, 0, 1, 1]"""
    return [rank for rank, count in packed for _ in range(count)]
