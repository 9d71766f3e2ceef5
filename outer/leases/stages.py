"""The border between two stages of a run in the data ledger.

A unit stands for other sequences in each stage. So at the border no unit of the earlier stage
is left to be read: leases end, leased and returned units are closed, and all holders get new leases
after the border.

    unit    0 . . . . . . . end | gap that is never read | first . . . . . .
            stage 0             |                       | stage 1

The gap covers the places beyond the frontier where an island without a lease may read. The units
that it has read there in the earlier stage are below the border, so its claim is refused.
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
    """First unit that the earlier stage has never leased."""
    first: Unit
    """First unit of the new stage."""


def stage_of(unit: int, borders: Sequence[Border]) -> int:
    """Return the number of the stage, from 0, to which a unit belongs."""
    return sum(unit >= border.first for border in borders)
