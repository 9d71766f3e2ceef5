"""An earlier committed state to which the islands of a run may go back together."""

from collections.abc import Mapping
from dataclasses import dataclass

from outer.state.part_state import PartState


@dataclass(frozen=True)
class EarlierState:
    """One rank's parts of a state that was committed some rounds ago and saved since."""

    round: int
    """Number of rounds committed in that state."""
    digest: str
    """Digest of all parts. Islands that name the same digest hold the same params and outer
    momentum.
    """
    parts: Mapping[int, PartState]
    """The states of the parts that this rank carries, by part."""
