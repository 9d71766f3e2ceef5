"""What is known of a run and of each of its islands, by their answers or from their records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diloco.status.reply import IslandStatus, Training


@dataclass(frozen=True, kw_only=True)
class SeenIsland:
    """An island as seen from this machine."""

    name: str
    state: str
    """What it is doing, or why it has not answered."""
    training: Training | None = None
    """The training that it reports; None if it has not answered."""
    status: IslandStatus | None = None
    """Its whole answer, if it is running and was asked."""
    round: int | None = None
    """Committed rounds of the run, by its record in the swarm or by its own last records."""
    digest: str = ""
    """Digest of the state that it holds after these rounds."""
    path: str = ""
    """The route by which it was reached."""

    def to_json(self) -> dict[str, Any]:
        """Return the same as values for JSON."""
        told = self.status or self.training
        own = {"name": self.name, "state": self.state, "round": self.round, "digest": self.digest, "path": self.path}
        return ({} if told is None else told.model_dump()) | own | {"answered": self.status is not None}


@dataclass(frozen=True)
class RunStatus:
    """A run and its islands."""

    name: str
    where: str
    """The address or the folder of the run."""
    config_hash: str
    islands: Sequence[SeenIsland]
    num_steps: int
    """Inner steps of the whole run; 0 if unknown."""
    num_rounds: int

    @property
    def digests_by_round(self) -> dict[int, set[str]]:
        """Digests of the states that islands hold, by the number of committed rounds."""
        digests: dict[int, set[str]] = {}
        for island in self.islands:
            if island.round is not None and island.digest:
                digests.setdefault(island.round, set()).add(island.digest)
        return digests

    def to_json(self) -> dict[str, Any]:
        """Return the same as values for JSON."""
        own = {"name": self.name, "where": self.where, "config_hash": self.config_hash}
        own |= {"num_steps": self.num_steps, "num_rounds": self.num_rounds}
        return own | {"islands": [island.to_json() for island in self.islands]}
