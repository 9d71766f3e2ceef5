"""The duties of an island around its rounds, and the choice between the two kinds of rounds."""

from typing import Protocol

from diloco.assemble import Runtime
from diloco.island_duties.going_back import GoingBack
from diloco.island_duties.of_all import IslandDuties
from diloco.island_duties.of_quorum import QuorumDuties
from diloco.island_rounds.of_all import IslandRounds
from diloco.island_rounds.of_quorum import QuorumIslandRounds


class Duties(Protocol):
    """What the loop of an island (island.py) needs to know of its rounds, whatever they wait
    for.
    """

    @property
    def rounds(self) -> IslandRounds | QuorumIslandRounds:
        """Turns inner steps into rounds, and calls these duties around them."""
        ...

    @property
    def going_back(self) -> GoingBack: ...

    @property
    def cycle(self) -> int:
        """The cycle of the last round that has landed."""
        ...

    @property
    def first_unproven(self) -> int | None:
        """Inner step from which on checkpoints are not proved good by a finite loss after them;
        None: all are.
        """
        ...

    @property
    def progress(self) -> str:
        """How far the run is, for the record of an island that leaves it."""
        ...

    @property
    def result(self) -> str:
        """What the run has done, for the record of its end."""
        ...

    def end(self) -> None:
        """Do what is left to do when the run is over, before the island leaves."""


def build_duties(runtime: Runtime, *, has_saved: bool) -> Duties:
    """Return the duties for the config's `outer.wait_for`. `has_saved`: whether there is a
    checkpoint.
    """
    if runtime.config.outer.wait_for == "quorum":
        return QuorumDuties(runtime, has_saved=has_saved)
    return IslandDuties(runtime, has_saved=has_saved)
