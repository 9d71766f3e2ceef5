"""The border between two stages of a run, in the account of its data.

The units of a stage mean other sequences than those of the stage before. So at the border no unit of the stage before
is left to be read: leases end, what is leased or returned is closed, and all holders lease anew behind the border.

    unit    0 . . . . . . . end | gap that nobody reads | first . . . . . .
            stage 0             |                       | stage 1

The gap is as wide as the places beyond the frontier where an island without a lease may read. What it has read there
in the stage before lies below the border, and its claim is refused.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from outer.leases.ranges import MAX_UNIT

MAX_STAGES = 256
"""Maximum number of stages of a run."""
Unit = Annotated[int, Field(ge=0, le=MAX_UNIT)]


class Border(NamedTuple):
    """The units at a border between two stages."""

    end: Unit
    """First unit that the stage before has never leased."""
    first: Unit
    """First unit of the stage that begins."""


def stage_of(unit: int, borders: Sequence[Border]) -> int:
    """The number of the stage, from 0, to which a unit belongs."""
    return sum(unit >= border.first for border in borders)
