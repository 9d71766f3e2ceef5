"""What one island knows of the run: who is in it, which islands live, and which states they claim to hold."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from outer.agreement.messages import Status
from outer.agreement.rules import Behind, Rules, find_behind
from outer.errors import MessageError

MAX_ISLANDS = 1024


@dataclass
class Knowledge:
    """Tables of one island about the others. All values in them are immutable: copying the tables copies the state."""

    me: str
    rules: Rules
    status: Status
    present: frozenset[str] = frozenset()
    """The other islands in the run, whether they live or not."""
    lost: frozenset[str] = frozenset()
    """Islands that did not answer the last call."""
    reported: frozenset[str] = frozenset()
    """Islands whose status arrived after the current gathering began."""
    statuses: dict[str, Status] = field(default_factory=dict)
    """Last known status by island."""
    doubted: dict[str, Status] = field(default_factory=dict)
    """Claims to be ahead that could not be made good, by island; see `disbelieve`."""

    def add(self, islands: Iterable[str]) -> None:
        """Record islands that are in the run."""
        self.present |= frozenset(islands) - {self.me}

    def hear(self, island: str) -> None:
        """Record that a message of the island has arrived. Raises MessageError if too many islands are known."""
        if island not in self.present and len(self.present) >= MAX_ISLANDS:
            raise MessageError(f"{self.me!r} knows of {MAX_ISLANDS} islands already")
        self.add([island])
        self.lost -= {island}

    def record(self, island: str, status: Status) -> None:
        """Record which state the island says it holds. Raises MessageError if the run has fewer rounds."""
        if status.round > self.rules.max_round:
            raise MessageError(f"{island!r} claims round {status.round}, the run has {self.rules.max_round}")
        self.statuses[island] = status
        self.reported |= {island}

    def forget(self, island: str) -> None:
        """Remove an island that has left the run."""
        self.present -= {island}
        self.lost -= {island}
        self.reported -= {island}
        self.statuses.pop(island, None)

    def is_near(self, round_number: int) -> bool:
        """Whether a round is within one of this island's. Messages on other rounds would only fill the memory."""
        return abs(round_number - self.status.round) <= 1

    @property
    def live(self) -> dict[str, Status]:
        """Last known status of the other islands that are not lost and whose claims are believed, by island."""
        islands = self.present - self.lost
        return {name: s for name, s in self.statuses.items() if name in islands and not self._is_doubted(name, s)}

    @property
    def awaited(self) -> frozenset[str]:
        """The other islands that may take part in a round: they are not lost, and their claims are believed."""
        return self.present - self.lost - (self.statuses.keys() - self.live.keys())

    @property
    def agreeing(self) -> frozenset[str]:
        """The other live islands that hold this island's state and are on their way to its next round."""
        here = self.status.rank, self.status.digest
        return frozenset(name for name, s in self.live.items() if s.is_coming and (s.rank, s.digest) == here)

    def behind(self, *, is_settled: bool) -> Behind | None:
        """The surviving history, or None if it is this island's. `is_settled`: all islands that count have reported."""
        return find_behind(self.me, self.status, self.live, is_settled=is_settled)

    def disbelieve(self, island: str, claim: Status) -> None:
        """Ignore what the island claims to hold until `believe`, unless it claims no more than this island holds.

        Call it when the state of `claim` could not be taken: the island is neither followed nor waited for.
        """
        self.doubted[island] = claim

    def believe(self, island: str) -> None:
        """Take the island's claims seriously again."""
        self.doubted.pop(island, None)

    def _is_doubted(self, island: str, status: Status) -> bool:
        claim = self.doubted.get(island)
        is_same = claim is not None and (status.rank, status.digest) == (claim.rank, claim.digest)
        return claim is not None and (status.rank > self.status.rank or (is_same and status.rank == self.status.rank))
