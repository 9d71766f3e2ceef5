"""Sizes of leases, and the other settings that determine the ledger of a run."""

from typing import Annotated

from pydantic import Field

from outer.leases.ranges import MAX_UNIT
from outer.leases.stages import MAX_STAGES
from outer.network.messages import MAX_ROUND, MAX_TOKENS, IslandName, Message

LEASE_ROUNDS = 4
"""Size of a full lease in rounds: one is being trained, one is in flight, and two are for
re-based progress."""
SPARE_ROUNDS = 2
"""Number of rounds of units that an island without a lease may read before its first commit."""


class Terms(Message):
    """Sizes of leases in units, and the other terms. They are the same on every island."""

    inner_steps: int = Field(ge=1, le=MAX_UNIT)
    stage_rounds: tuple[Annotated[int, Field(ge=0, lt=MAX_ROUND)], ...] = Field(
        default=(), max_length=MAX_STAGES
    )
    """The first round of each stage after the first, if islands wait for all."""
    stage_tokens: tuple[Annotated[int, Field(ge=1, lt=MAX_TOKENS)], ...] = Field(
        default=(), max_length=MAX_STAGES
    )
    """The committed tokens with which each stage after the first begins, if islands wait for a
    quorum."""
    counted: tuple[IslandName, ...] = Field(default=(), max_length=4096)
    """Islands with data of their own, whose position in it is the number of units that they have
    trained."""

    @property
    def lease(self) -> int:
        return LEASE_ROUNDS * self.inner_steps

    @property
    def spare(self) -> int:
        return SPARE_ROUNDS * self.inner_steps

    def count_borders(self, num_rounds: int, tokens: int) -> int:
        """Return how many stages have ended with this number of committed rounds and tokens."""
        by_rounds = sum(num_rounds >= first for first in self.stage_rounds)
        by_tokens = sum(tokens >= first for first in self.stage_tokens)
        return by_rounds + by_tokens
