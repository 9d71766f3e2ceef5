"""What islands tell one another about a round. Pure data; what follows from it is in protocol.py.

Ready     -> all islands         "my inner steps of round r are done; this is my state's digest", or "I listen"
Plan      -> its participants    "attempt a of round r is made by these islands, in this order"
Vote      -> its participants    "I have the result, this is its digest" or "I have not, because ..." -> Heard
Question  -> its participants    "a vote or its receipt is missing: what came of this plan?" -> Answer
Standing  -> all islands         "this is where I stand", each second; also the answer to a Ready
Goodbye   -> all islands         "I leave; do not wait for me"
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from outer.errors import MessageError
from outer.transports.base import Endpoint

MAX_RANKS = 4096
MAX_ROUND = 1 << 30
MAX_TOKENS = 1 << 62
Name = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
Digest = Field(pattern=r"^[0-9a-f]{16,64}$")
PlanId = Field(pattern=r"^[0-9a-f]{32}$")
Outcome = Literal["commit", "abort", "open"]


class Message(BaseModel):
    """Base of what comes from a peer: checked strictly, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Standing(Message):
    """Where an island stands: the state it holds, and whether it is on its way to the end of the round."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    """Rounds committed."""
    tokens: int = Field(ge=0, lt=MAX_TOKENS)
    """That all committed pseudo-gradients were trained on. Of two histories the one with more tokens survives."""
    digest: str = Digest
    """Of the global params, the outer momentum and the account of the data."""
    attempt: int = Field(default=0, ge=0, lt=1 << 20)
    """In an answer: the least attempt for which the asked island would plan with the asking one."""
    is_coming: bool = True
    """False: it is taking another island's state, nobody should wait for it."""

    @property
    def rank(self) -> tuple[int, int]:
        """Histories with a higher rank survive those with a lower one."""
        return self.tokens, self.round


class Ready(Message):
    """An island has done its inner steps of `round`, or listens, and could take part in a plan."""

    island: str = Name
    incarnation: str = Field(pattern=r"^[0-9a-f]{8,32}$")
    round: int = Field(ge=0, lt=MAX_ROUND)
    attempt: int = Field(ge=0, lt=1 << 20)
    """The first that it would take part in: a ready is good for one plan."""
    tokens: int = Field(ge=0, lt=1 << 53)
    """Trained since the round that it sent last."""
    weight: int = Field(ge=0, lt=1 << 53)
    """Tokens trained since it sent the round's fragment last: the island's weight in the mean."""
    listens: bool = False
    """It still trains: it takes part without giving anything, with 0 tokens, and gets the mean."""
    base_tokens: int = Field(ge=0, lt=MAX_TOKENS)
    """Behind those global params: `Standing.tokens`."""
    digest: str = Digest
    """Of the committed state that the inner steps began from: global params, outer momentum, account of the data."""
    first: int = Field(default=0, ge=0, lt=1 << 60)
    units: int = Field(default=0, ge=0, lt=1 << 53)
    """The units of text that the progress has read: so many of the island's lease, which begins with `first`.

    Who listens has given none; its lease becomes its own, if it is not yet.
    """
    step_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Median time of an inner step; 0: not measured."""
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
        """Raise MessageError unless every part has a carrier, every rank two addresses, and who listens no tokens."""
        if len(self.control_addresses) != len(self.transport_addresses):
            raise MessageError(f"island {self.island!r} gives its ranks unequal numbers of addresses")
        if self.listens and (self.tokens or self.weight):
            raise MessageError(f"island {self.island!r} listens, and claims {max(self.tokens, self.weight)} tokens")
        if self.listens and self.units:
            raise MessageError(f"island {self.island!r} listens, and claims {self.units} units")
        check_carriers(self.carriers, num_parts, len(self.transport_addresses))

    @property
    def standing(self) -> Standing:
        return Standing(round=self.round, tokens=self.base_tokens, digest=self.digest)

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
    def givers(self) -> list[Ready]:
        """Those whose pseudo-gradients the mean is of."""
        return [p for p in self.participants if not p.listens]

    @cached_property
    def id(self) -> str:
        """Names this plan and no other: votes for another plan of the same attempt do not count."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:32]

    @property
    def addresses(self) -> dict[Endpoint, str]:
        """Every endpoint of every participant with its transport address."""
        return {e: a for p in self.participants for e, a in p.endpoints.items()}


class Vote(Message):
    """What an island has to say of a plan after the reduce."""

    plan: str = PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)
    island: str = Name
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{16,64}$")
    """Of the reduced mean; None: the reduce failed here, or the plan was refused."""
    cause: str = Field(default="", max_length=2000)
    accused: str | None = Field(default=None, min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """The participant whose payload could not be used; None: it is nobody's fault."""


def yes(plan: Plan, island: str, digest: str) -> Vote:
    """The vote of an island that has the mean with this digest."""
    return Vote(plan=plan.id, round=plan.round, island=island, digest=digest)


def no(plan: Plan, island: str, cause: str, accused: str | None = None) -> Vote:
    """The vote of an island without a mean, and why; `accused` sent what could not be used."""
    return Vote(plan=plan.id, round=plan.round, island=island, cause=cause[:2000], accused=accused)


class Heard(Message):
    """A vote has come to the sender, and what has come of its plan there by then."""

    plan: str = PlanId
    outcome: Outcome


class Question(Message):
    """What came of this plan? Whoever answers `open` will not commit it without asking in turn."""

    plan: str = PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)


class Answer(Message):
    """What came of a plan, as far as the asked island knows."""

    plan: str = PlanId
    outcome: Outcome


class Goodbye(Message):
    """An island leaves the run."""

    island: str = Name
    incarnation: str = Field(pattern=r"^[0-9a-f]{8,32}$")
    round: int = Field(ge=0, lt=MAX_ROUND)
    steps: int = Field(ge=0)
    """Inner steps of the round that it had made: where its data stand."""


M = TypeVar("M", bound=Message)


def parse(model: type[M], body: bytes) -> M:
    """The message in a peer's bytes. Raises MessageError when they are not one."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MessageError(f"not a {model.__name__}: {where}: {first['msg']}") from None


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
