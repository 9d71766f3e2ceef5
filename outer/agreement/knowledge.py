"""What one island knows of the run: who is in it, which islands live, and which states they claim to hold."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from outer.agreement.messages import Ready, Status
from outer.agreement.planner import Gathering
from outer.agreement.readiness import ReadyTable
from outer.agreement.rules import Behind, Rules, find_behind
from outer.agreement.suspicions import MAX_DISSENTS, MAX_TIES, Suspicions, explain_dissent, explain_tie
from outer.agreement.votes import VoteTable


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

    own: Ready | None = None
    """This island's ready message while it takes part in an attempt."""
    readies: ReadyTable = field(default_factory=ReadyTable)
    vote_table: VoteTable = field(default_factory=VoteTable)
    suspicions: Suspicions = field(default_factory=Suspicions)

    def add(self, islands: Iterable[str]) -> None:
        """Record islands that are in the run."""
        self.present |= frozenset(islands) - {self.me}

    @property
    def live(self) -> dict[str, Status]:
        """Last known status of the other islands that are not lost and whose claims are believed, by island."""
        islands = self.present - self.lost
        return {name: s for name, s in self.statuses.items() if name in islands and not self._is_doubted(name, s)}

    @property
    def awaited(self) -> frozenset[str]:
        """The other islands that may take part in a round: they are not lost, and their claims are believed."""
        return self.present - self.lost - (self.statuses.keys() - self.live.keys())

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

    # -- what follows for the next plan -------------------------------------------------------------------------
    @property
    def next_attempt(self) -> int:
        """First attempt at this round that no plan with this island's ready message has used."""
        return self.readies.next_attempt(self.me, self.status.round)

    def pass_over(self, *, is_late: bool) -> str | None:
        """Wait no longer for the plan of the island that should make one. Returns its name, if it is another."""
        planner = self.gathering.find_planner(is_late=is_late)
        if planner in (None, self.me):
            return None
        self.suspicions.passed_over |= {planner}
        if self.me in self.gathering.excluded:
            self.suspicions.forgive()  # The others do not go on without this island, perhaps for a reason like its own.
        return planner

    @property
    def gathering(self) -> Gathering:
        """What this island knows about the others while it gathers."""
        assert self.own is not None, "an island considers plans when it is ready"
        excluded = self.suspicions.excluded(self.status.round, self.vote_table.votes) if self.awaited else {}
        return Gathering(
            self.own,
            self.status,
            self.rules,
            self.awaited,
            self.reported,
            self.live,
            self.readies,
            excluded,
            self.suspicions.left_out,
            self.suspicions.passed_over,
        )

    def find_end(self) -> str | None:
        """Why this island cannot go on, because of digests that differ, or None."""
        here = self.status.rank, self.status.digest
        same = {name for name, s in self.live.items() if s.is_coming and (s.rank, s.digest) == here}
        ties = self.suspicions.find_ties(frozenset(same | {self.me}), self.vote_table.votes)
        if len(ties) >= MAX_TIES:
            return explain_tie(self.status.round, ties)
        own = self.suspicions.dissents.get(self.me)
        return explain_dissent(own.count) if own is not None and own.count >= MAX_DISSENTS else None
