"""Exchange of the votes on a plan among all participants: through the planner, or directly from
each to each.

Among many participants the planner forwards the votes, so that each of them sends a few messages
and not n per round:

    Vote        each participant -> planner
    VoteList    planner -> all: the votes of all, once it has them. Very many forward it along a
                tree, and acknowledge it to the planner
    Settled     planner -> all: all have acknowledged the list. They commit, and report it in their
                receipts The planner commits after the first of them: if it freezes, the others can
                commit without it.

Few participants, and any that cannot rely on the planner (it is lost or slow, or one has voted no),
send their vote to each of the others, which acknowledge it. An island commits when it has the votes
of all, and all have its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from outer.agreement.coordination import find_branches
from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import (
    Outcome,
    OutcomeQuery,
    Plan,
    Settled,
    Vote,
    VoteList,
    VoteReceipt,
)
from outer.agreement.rules import Rules
from outer.agreement.votes import VoteTable
from outer.network.messages import Message


@dataclass
class VoteExchange:
    """One island's part in the exchange of votes on a plan. All values in its fields are
    immutable.
    """

    plan: Plan | None = None
    """The plan in which this island takes part."""
    is_direct: bool = True
    """Whether this island sends its vote to each of the others."""
    has_lists: bool = False
    """Whether the plan has so many participants that its planner forwards their votes."""
    passed_on: VoteList | Settled | None = None
    """The last list or `Settled` that this island has sent as the planner, or forwarded."""
    branches: frozenset[str] = frozenset()
    """The participants to which this island sends the votes of all, as the planner or when it
    receives them."""
    num_repeats: int = 0
    """The number of times that unacknowledged messages have been due for repetition."""
    is_settled: bool = False
    """Whether the planner has announced that all participants have the votes of all."""
    is_querying: bool = False
    """Whether this island has asked the other participants for the outcome of the plan."""
    outbox: list[tuple[Iterable[str], Message]] = field(default_factory=list)
    """Messages to send, each with the islands that receive it."""

    def begin(self, plan: Plan, me: str, rules: Rules) -> None:
        """Begin the exchange for a plan in which this island takes part."""
        self.plan = plan
        self.passed_on = None
        self.is_settled = False
        self.is_querying = False
        self.has_lists = len(plan.names) > rules.direct_islands
        self.is_direct = not self.has_lists
        self.branches = find_branches(plan, me, rules)
        self.num_repeats = 0

    def end(self) -> None:
        """End the exchange: this island takes part in no plan."""
        self.plan = None
        self.is_querying = False

    def vote(self, vote: Vote, table: VoteTable, knowledge: Knowledge) -> None:
        """Cast this island's vote."""
        assert self.plan is not None and vote.plan == self.plan.id, (
            "an island votes on the plan it takes part in"
        )
        table.add(signed := vote.signed(self.plan, knowledge.signer.sign))
        if vote.digest is None:
            self.is_direct = True  # A no aborts the plan, so the others need not wait any longer.
        others = self.others(knowledge.me)
        self.outbox.append((others if self.is_direct else others & {self.plan.planner}, signed))

    def conclude(
        self, table: VoteTable, knowledge: Knowledge, *, is_late: bool, is_over: bool, is_slow: bool
    ) -> Outcome:
        """Return the outcome of the plan on this island. The arguments are as in
        `RoundProtocol.conclude`.
        """
        assert self.plan is not None, "an island concludes the plan it takes part in"
        self._go_on(self.plan, table, knowledge, is_slow=is_slow or is_late)
        if self.plan.id in table.outcomes:
            return table.outcomes[self.plan.id][1]  # The planner has this in a receipt already.
        reachable = self.others(knowledge.me) - knowledge.lost
        outcome = table.decide(self.plan, reachable, is_late=is_late)
        if outcome == "query":
            if not self.is_querying:
                self._query(self.plan, table, reachable)
            self.is_querying = True
            outcome = table.resolve(self.plan, frozenset() if is_over else reachable)
        elif outcome == "commit" and self._holds_back(self.plan, table, knowledge.me):
            return "open"
        _record(self.plan, outcome, table, knowledge)
        return outcome

    def repeat(self, table: VoteTable, knowledge: Knowledge) -> None:
        """Send messages that may have been lost again."""
        if self.plan is None or (own := table.votes.get((self.plan.id, knowledge.me))) is None:
            return
        others = self.others(knowledge.me)
        pending = table.pending(self.plan) & others
        planner = self.plan.planner
        if self.is_direct:
            self.outbox.append((pending, own))
            if self.passed_on is not None and planner == knowledge.me:
                self.outbox.append((others, self.passed_on))
        elif planner != knowledge.me and (self.plan.id, planner) not in table.receipts:
            self.outbox.append(({planner}, own))
        elif isinstance(self.passed_on, Settled):
            self.outbox.append((others, self.passed_on))
        elif self.passed_on is not None and planner == knowledge.me:
            self.num_repeats += 1
            # For the first second the list is still being forwarded from island to island.
            late = pending & self.branches if self.num_repeats == 1 else pending
            self.outbox.append((late, self.passed_on))
        if self.is_querying:
            self._query(self.plan, table, others - knowledge.lost)

    def receive(
        self,
        sender: str,
        message: VoteList | Settled,
        table: VoteTable,
        knowledge: Knowledge,
        *,
        has_voted: bool,
    ) -> VoteReceipt:
        """Process a message that the planner sends or others forward. After `Settled` this island
        commits and reports it at once.

        `has_voted`: whether this island has voted on the current plan. Raises MessageError if a
        vote is missing or unsigned.
        """
        plan = self.plan
        if plan is not None and message.plan == plan.id and has_voted:
            if isinstance(message, VoteList):
                self._take_list(sender, message, plan, table, knowledge)
            elif sender == plan.planner:
                table.settle(plan)
                self.is_settled = True
                if table.decide(plan, self.others(knowledge.me), is_late=False) == "commit":
                    _record(plan, "commit", table, knowledge)
        is_near = knowledge.is_near(message.round)
        return VoteReceipt(
            plan=message.plan, outcome=table.outcome_of(message.plan, is_near=is_near)
        )

    def _take_list(
        self, sender: str, message: VoteList, plan: Plan, table: VoteTable, knowledge: Knowledge
    ) -> None:
        """Remember the votes of all, whichever island sends them, and forward them. Raises like
        `VoteTable.add_list`.
        """
        table.add_list(sender, message, plan, knowledge.signer.verify)
        if self.passed_on is None and plan.planner != knowledge.me:
            self.passed_on = message
            self.outbox.append((self.branches, message))
        if sender != plan.planner:
            receipt = VoteReceipt(plan=plan.id, outcome=table.outcome_of(plan.id, is_near=True))
            self.outbox.append(({plan.planner}, receipt))

    def others(self, me: str) -> frozenset[str]:
        """Return the participants without this island."""
        return frozenset(self.plan.names) - {me} if self.plan is not None else frozenset()

    def _go_on(self, plan: Plan, table: VoteTable, knowledge: Knowledge, *, is_slow: bool) -> None:
        """Forward votes, or stop relying on the planner. `is_slow`: the planner's time to
        forward the votes is over.
        """
        cannot_rely = is_slow or plan.planner in knowledge.lost or _is_in_doubt(plan, table)
        if cannot_rely and not self.is_direct:
            self.is_direct = True
            self.repeat(table, knowledge)
        if not self.has_lists or plan.planner != knowledge.me:
            return
        if message := self._find_next(plan, table, knowledge.me):
            self.passed_on = message
            is_list = isinstance(message, VoteList)
            self.outbox.append((self.branches if is_list else self.others(knowledge.me), message))

    def _find_next(self, plan: Plan, table: VoteTable, me: str) -> VoteList | Settled | None:
        """Return the planner's next message to all, or None if it is not time for one."""
        if self.passed_on is None:
            return VoteList.of(plan, table.cast(plan))
        has_all = table.tally(plan) == "commit" and not table.pending(plan) & self.others(me)
        is_over = isinstance(self.passed_on, Settled)
        return Settled(plan=plan.id, round=plan.round) if has_all and not is_over else None

    def _holds_back(self, plan: Plan, table: VoteTable, me: str) -> bool:
        """Return whether this island must not commit yet, although votes and receipts are complete.

        It must wait while the others could not find out by themselves that it has committed.
        """
        if not self.has_lists or not self.others(me):
            return False
        if plan.planner != me:
            return not self.is_direct and not self.is_settled
        # This also holds if it writes to all by now: the others may have sent their votes to it
        # alone.
        return all(table.receipts.get((plan.id, name)) != "commit" for name in self.others(me))

    def _query(self, plan: Plan, table: VoteTable, reachable: frozenset[str]) -> None:
        asked = table.without_reply(plan) & reachable
        self.outbox.append((asked, OutcomeQuery(plan=plan.id, round=plan.round)))


def _is_in_doubt(plan: Plan, table: VoteTable) -> bool:
    """Return whether the plan may not commit while missing votes would give the reason."""
    is_complete = len(table.cast(plan)) == len(plan.names)
    return plan.id in table.query_first or (table.tally(plan) == "abort" and not is_complete)


def _record(plan: Plan, outcome: Outcome, table: VoteTable, knowledge: Knowledge) -> None:
    """Record the plan's outcome on this island as final, unless it is open."""
    if outcome != "open":
        table.outcomes[plan.id] = (plan.round, outcome)
    if outcome == "commit":
        knowledge.claims.add(table.certify(plan))
