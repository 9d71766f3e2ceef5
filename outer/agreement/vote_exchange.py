"""How the votes on a plan reach all of its participants: through the planner, or from each to each.

Among many participants the planner passes the votes on, so that a round takes each of them a few messages and not n:

    Vote        each participant -> planner
    VoteList    planner -> all: the votes of all, once it has them
    Settled     planner -> all: all have acknowledged the list. They commit, and say so in their receipts
                The planner commits when the first of them has: if it freezes, they need not hear of it to go on.

Few participants, and any that cannot rely on the planner (it is lost or slow, or somebody has voted no), send their
vote to each of the others, which acknowledge it. An island commits when it has the votes of all, and all have its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from outer.agreement.messages import Plan, Settled, Vote, VoteList
from outer.agreement.votes import VoteTable


@dataclass
class VoteExchange:
    """One island's part in it. Its fields hold immutable values."""

    me: str
    plan: Plan | None = None
    is_direct: bool = True
    """Whether this island sends its vote to each of the others."""
    passed_on: VoteList | Settled | None = None
    """What this island has sent last as the planner."""
    is_settled: bool = False
    """Whether the planner has told this island that all have the votes of all."""

    def begin(self, plan: Plan, direct_islands: int) -> None:
        """This island takes part in the plan. `direct_islands`: up to so many participants vote from each to each."""
        self.plan, self.passed_on, self.is_settled = plan, None, False
        self.is_direct = len(plan.names) <= direct_islands

    def vote(self, vote: Vote) -> list[tuple[Iterable[str], Vote]]:
        """What to send when this island votes."""
        assert self.plan is not None, "an island votes on the plan it takes part in"
        if vote.digest is None:
            self.is_direct = True  # The others need not wait for each other any longer.
        if self.is_direct:
            return [(self._others, vote)]
        return [({self.plan.planner} - {self.me}, vote)]

    def go_on(
        self, table: VoteTable, lost: frozenset[str], *, is_slow: bool
    ) -> list[tuple[Iterable[str], Vote | VoteList | Settled]]:
        """What to send next. `is_slow`: the planner has had its time."""
        if self.plan is None or self.is_direct or (self.plan.id, self.me) not in table.votes:
            return []
        if is_slow or self.plan.planner in lost or self._is_in_doubt(table):
            self.is_direct = True
            return self.repeat(table)
        message = self._find_next(self.plan, table)
        self.passed_on = message or self.passed_on
        return [(self._others, message)] if message else []

    def repeat(self, table: VoteTable) -> list[tuple[Iterable[str], Vote | VoteList | Settled]]:
        """What to send again because it may have been lost."""
        if self.plan is None or (own := table.votes.get((self.plan.id, self.me))) is None:
            return []
        pending = table.pending(self.plan) & self._others
        if self.is_direct:
            return [(pending, own)]
        if self.plan.planner != self.me:
            has_receipt = (self.plan.id, self.plan.planner) in table.receipts
            return [] if has_receipt else [({self.plan.planner}, own)]
        if self.passed_on is None:
            return []
        return [(self._others if isinstance(self.passed_on, Settled) else pending, self.passed_on)]

    def holds_back(self, table: VoteTable) -> bool:
        """Whether this island must not commit yet, although it has all votes, and all have its own.

        The others could not find out by themselves that it has committed.
        """
        if self.plan is None or self.is_direct or not self._others:
            return False
        if self.plan.planner != self.me:
            return not self.is_settled
        return all(table.receipts.get((self.plan.id, name)) != "commit" for name in self._others)

    @property
    def _is_passing(self) -> bool:
        return self.plan is not None and self.plan.planner == self.me and not self.is_direct

    @property
    def _others(self) -> frozenset[str]:
        return frozenset(self.plan.names) - {self.me} if self.plan is not None else frozenset()

    def _is_in_doubt(self, table: VoteTable) -> bool:
        """Whether the plan may not commit and votes are missing, which say why."""
        assert self.plan is not None, "asked about the plan under way"
        is_complete = len(table.cast(self.plan)) == len(self.plan.names)
        return self.plan.id in table.query_first or (table.tally(self.plan) == "abort" and not is_complete)

    def _find_next(self, plan: Plan, table: VoteTable) -> VoteList | Settled | None:
        """What the planner passes on next, if it is time to do so."""
        if not self._is_passing or isinstance(self.passed_on, Settled):
            return None
        if self.passed_on is None:
            return VoteList.of(plan, table.cast(plan))
        has_all = table.tally(plan) == "commit" and not table.pending(plan) & self._others
        return Settled(plan=plan.id, round=plan.round) if has_all else None
