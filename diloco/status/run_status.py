"""What is known of a run and of each of its islands, by their answers or from their records."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco.overview.overview import Overview
from diloco.records.figures import IslandFigures
from diloco.status.reply import IslandStatus


@dataclass(frozen=True, kw_only=True)
class SeenIsland:
    """An island as seen from this machine."""

    name: str
    state: str
    """What it is doing, or why it has not answered."""
    figures: IslandFigures | None = None
    """Its figures by its answer or its records; None if it has not answered."""
    status: IslandStatus | None = None
    """Its whole answer, if it is running and was asked."""
    round: int | None = None
    """Committed rounds of the run, by its record in the swarm or by its own last records."""
    digest: str = ""
    """Digest of the state that it holds after these rounds."""
    path: str = ""
    """The route by which it was reached."""

    @property
    def newest_round(self) -> int | None:
        """Committed rounds of the run. The answer of an island is newer than its record in the
        swarm.
        """
        return self.figures.round if self.figures is not None else self.round

    def to_json(self) -> dict[str, Any]:
        """Return the same as values for JSON."""
        place = (
            {}
            if self.status is None
            else self.status.model_dump(exclude={"tokens", "event_seconds"})
        )
        figures = {} if self.figures is None else asdict(self.figures)
        own = {
            "name": self.name,
            "state": self.state,
            "round": self.newest_round,
            "digest": self.digest,
        }
        return place | figures | own | {"path": self.path, "answered": self.status is not None}


@dataclass(frozen=True)
class RunStatus:
    """A run and its islands."""

    name: str
    where: str
    """The address or the folder of the run."""
    config_hash: str
    islands: Sequence[SeenIsland]
    num_steps: int | None
    """Inner steps of each island in the whole run; None if unknown."""
    num_rounds: int | None
    """Rounds of the whole run; None if unknown."""
    overview: Overview | None = None
    """Its first lines, by the records in its folder; None for a run at an address."""

    @property
    def round(self) -> int:
        """Committed rounds of the run, by its most advanced island."""
        return max((island.newest_round or 0 for island in self.islands), default=0)

    @property
    def committed_tokens(self) -> int | None:
        """Tokens of all islands in committed rounds, by the answers of islands; None without an
        answer.
        """
        return max(
            (island.status.tokens for island in self.islands if island.status is not None),
            default=None,
        )

    @property
    def digests_by_round(self) -> dict[int, list[str]]:
        """Digests of the states that islands hold, one for each island, by the number of committed
        rounds.
        """
        digests: dict[int, list[str]] = {}
        for island in self.islands:
            if island.round is not None and island.digest:
                digests.setdefault(island.round, []).append(island.digest)
        return digests

    def to_json(self) -> dict[str, Any]:
        """Return the same as values for JSON."""
        own = {"name": self.name, "where": self.where, "config_hash": self.config_hash}
        own |= {"num_steps": self.num_steps, "num_rounds": self.num_rounds}
        own |= {"round": self.round, "committed_tokens": self.committed_tokens}
        if self.overview is not None:
            own |= {"headline": self.overview.headline.to_json(), "since": self.overview.since}
            own |= {"incidents": self.overview.lines}
        return own | {"islands": [island.to_json() for island in self.islands]}
