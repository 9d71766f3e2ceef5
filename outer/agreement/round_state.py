"""The state of one island while it takes part in rounds: its tables, its own ready message, and
its outbox.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from outer.agreement.coordination import Coordination, Passing, PlanQuery, find_branches
from outer.agreement.knowledge import Knowledge, ReadyTable
from outer.agreement.messages import Plan, Ready
from outer.agreement.planner import Gathering, build_gathering
from outer.agreement.suspicions import Suspicions
from outer.agreement.vote_exchange import VoteExchange
from outer.agreement.votes import VoteTable
from outer.network.messages import Message

State = Literal["training", "gathering", "reducing", "voting"]


@dataclass
class RoundState:
    """One island's state in rounds. All values in its tables are immutable: copying the tables
    copies the state.
    """

    knowledge: Knowledge
    readies: ReadyTable = field(default_factory=ReadyTable)
    vote_table: VoteTable = field(default_factory=VoteTable)
    suspicions: Suspicions = field(default_factory=Suspicions)
    state: State = "training"
    own: Ready | None = None
    """This island's ready message while it takes part in an attempt."""
    exchange: VoteExchange = field(default_factory=VoteExchange)
    """The plan in which this island takes part, and how its votes are exchanged."""
    coordination: Coordination = field(init=False)
    """The coordinator of this round and this island's relation to it."""
    passing: Passing = field(default_factory=Passing)
    """Plans that have been announced to this island and have not arrived yet."""
    outbox: list[tuple[str, Message]] = field(default_factory=list)
    """Messages to send, each with the island that receives it."""

    def __post_init__(self) -> None:
        self.coordination = Coordination(self.knowledge.me)

    @property
    def next_attempt(self) -> int:
        """First attempt at this round that no plan with this island's ready message has used."""
        return self.readies.next_attempt(self.knowledge.me, self.knowledge.status.round)

    @property
    def gathering(self) -> Gathering:
        """This island's knowledge of the others while it gathers."""
        assert self.own is not None, "an island considers plans when it is ready"
        votes = self.vote_table.votes
        return build_gathering(
            self.own, self.knowledge, self.readies, self.coordination, self.suspicions, votes
        )

    @property
    def plan(self) -> Plan | None:
        """The plan in which this island takes part."""
        return self.exchange.plan

    @property
    def others(self) -> frozenset[str]:
        """The other participants of the plan."""
        return self.exchange.others(self.knowledge.me)

    def write_to_all(self) -> None:
        """Do not rely on a coordinator until the next commit."""
        if not self.coordination.is_direct:
            self.coordination.turn_direct()
            if self.state == "gathering" and self.own is not None and self.plan is None:
                self.send_ready(self.own)

    def meet(self, own: Ready) -> None:
        """Choose a coordinator for the first attempt of a run, among the live islands that have
        joined so far.
        """
        if (own.round, own.attempt) == (0, 0):
            live = self.knowledge.present - self.knowledge.lost
            self.coordination.meet(live | {self.knowledge.me}, self.knowledge.rules)

    def count_ready(self) -> int:
        """Return the value of `Status.num_ready` for this island's replies as the coordinator."""
        number = self.knowledge.status.round
        if number >= self.knowledge.rules.max_round:
            return int(not self.knowledge.has_stragglers)
        return len(self.readies.usable(number, self.knowledge.awaited)) + (self.own is not None)

    @property
    def is_waited_for(self) -> bool:
        """Return whether others may still need this island, which holds the last state of the run.

        The coordinator knows which islands have that state, and leaves last.
        """
        if self.coordination.is_led:
            return self.coordination.num_ready == 0
        others = self.knowledge.present - self.knowledge.lost
        return self.knowledge.has_stragglers or (self.coordination.is_mine and bool(others))

    def find_left_behind(self) -> frozenset[str]:
        """Return the islands to which this one must send its goodbye. After the last round the
        coordinator leaves last.
        """
        others = self.knowledge.present - self.knowledge.lost
        coordination = self.coordination
        if coordination.is_led and self.knowledge.status.round >= self.knowledge.rules.max_round:
            return others - frozenset(coordination.crew[1:])
        return others

    def give_up_coordinator(self) -> None:
        """Stop relying on the coordinator, because its plan did not come in time."""
        self.coordination.find_slow(self.knowledge.status.round)
        self.write_to_all()

    def stop_gathering(self) -> None:
        """Take part in no plan until the next ready message."""
        self.state = "training"
        self.own = None

    def pass_on(self, plan: Plan) -> None:
        """Forward the plan to this island's branches. It does so even if it takes no part
        itself, because others may.
        """
        self.passing.forget(plan.planner)
        if self.knowledge.me in plan.names:
            self.send(find_branches(plan, self.knowledge.me, self.knowledge.rules), plan)

    def answer_plan_query(self, sender: str, query: PlanQuery) -> None:
        """Send this island's plan to a participant that has not received it."""
        if (
            self.plan is not None
            and self.plan.id == query.plan
            and self.plan.planner == self.knowledge.me
        ):
            self.send([sender], self.plan)

    def require_query(self) -> None:
        """Forbid a commit of the open plan on votes alone, because other islands may have
        aborted it without this island.
        """
        if self.plan is not None and self.state in ("reducing", "voting"):
            self.vote_table.query_first[self.plan.id] = self.plan.round
            self.vote_table.forget_open(self.plan.id)
            self.exchange.is_querying = False

    def send_ready(self, own: Ready) -> None:
        self.send(self.coordination.receivers(self.knowledge.present), own)

    def send(self, islands: Iterable[str], message: Message) -> None:
        self.outbox += [(name, message) for name in sorted(islands) if name != self.knowledge.me]

    def send_votes(self) -> None:
        for islands, message in self.exchange.outbox:
            self.send(islands, message)
        self.exchange.outbox = []
