"""Which island collects the ready messages of a round, and how its plan reaches all, so that not all write to all.

After a commit its participants (the crew) know that all of them hold the same state. In the next round they send their
ready messages to one of them, the coordinator: the fastest, by the speeds in the last plan. It makes the plan, says how
many islands are ready, and finds out who is lost; the others watch it.

An island that has not taken part in the last commit writes to all. So does, until the next commit, every island that
finds the coordinator lost, slow or away, and every one after a failed attempt. An island does not rely for some rounds
on a coordinator that was slow.

A plan of many participants, and the list of their votes, are passed on from island to island, down a tree. Both name
all participants, so their planner would send n^2 bytes if it wrote to all. It stands at the root instead, and
each participant passes what it gets on to a few others, its branches. What the islands may believe does not depend on
who passes it on:

    Plan        is believed once the planner itself has said its hash (PlanNotice, to all)
    VoteList    has the signatures of all

So whoever passes on can only keep things back. Then who lacks the plan asks the planner for it (PlanQuery), and the
planner sends the list to those that have not acknowledged it, both within two seconds.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from pydantic import Field

from outer.agreement.messages import Plan, Status
from outer.agreement.proofs.certificate import PlanId
from outer.agreement.rules import Rules
from outer.agreement.suspicions import Streak
from outer.network.messages import MAX_ROUND, Message


@dataclass
class Coordination:
    """One island's view of it. Its fields hold immutable values."""

    me: str
    crew: tuple[str, ...] = ()
    """The participants of the last commit that have not left since, in the order in which they coordinate."""
    is_direct: bool = True
    """Whether this island writes to all others in this round."""
    num_ready: int = 0
    """How many islands are ready for this round, as the coordinator has said."""
    said: int | None = None
    """What `num_ready` was when this island had been held up, until the others' own messages show that it was wrong."""
    slow: dict[str, Streak] = field(default_factory=dict)
    """Coordinators whose plans did not come in time."""

    def begin_round(self, number: int, plan: Plan | None, rules: Rules) -> None:
        """Round `number` begins. `plan`: by whose commit; None if the state was taken from others."""
        is_calm = plan is not None and len(plan.names) > rules.direct_islands and not rules.has_observers
        speeds = {p.island: p.step_seconds or float("inf") for p in plan.participants} if plan and is_calm else {}
        self.crew = tuple(sorted(speeds, key=lambda name: (speeds[name], name)))
        is_slow = any(self.slow[name].until > number for name in self.crew[:1] if name in self.slow)
        self.is_direct, self.num_ready, self.said = not is_calm or is_slow, 0, None

    def meet(self, islands: Collection[str], rules: Rules) -> None:
        """Before the first commit nobody is known to be fast: among very many islands the first by name coordinates.

        Call it again when more islands have come.
        """
        has_begun = bool(self.crew) and self.is_direct
        if len(islands) > rules.tree_islands and not rules.has_observers and not has_begun:
            self.crew, self.is_direct = tuple(sorted(islands)), False

    def turn_direct(self) -> None:
        """From now on write to all, until the next commit."""
        self.is_direct, self.num_ready = True, 0

    def hold_up(self) -> None:
        """Remember how many islands the coordinator says are ready. `compare` checks it against direct messages."""
        self.said = self.num_ready

    def compare(self, ready: Collection[str], number: int) -> None:
        """Compare what the coordinator said with the islands of which this one knows by now that they are ready.

        Those that write to all have told the coordinator long before.
        """
        if self.said is not None and len(frozenset(self.crew) & frozenset(ready)) > self.said:
            self.said = None
            self._note_slow(self.crew[0], number)

    def hear(self, sender: str, status: Status, number: int) -> bool:
        """What the coordinator says in round `number`. Returns False if it is away, so that it cannot be relied on."""
        if sender != self.coordinator:
            return True
        if status.round == number:
            self.num_ready = max(self.num_ready, status.num_ready)
        return status.is_coming

    def find_slow(self, number: int) -> None:
        """The coordinator has had its time in round `number`."""
        if self.is_led:
            self._note_slow(self.crew[0], number)

    def _note_slow(self, island: str, number: int) -> None:
        self.slow[island] = self.slow.get(island, Streak()).add(number + 1)

    def leave(self, island: str) -> None:
        """The island has left the run, and all were told."""
        self.crew = tuple(name for name in self.crew if name != island)

    @property
    def coordinator(self) -> str | None:
        """The coordinator of this round; None if this island writes to all."""
        return None if self.is_direct or not self.crew else self.crew[0]

    @property
    def is_mine(self) -> bool:
        """Whether this island is the coordinator."""
        return self.coordinator == self.me

    @property
    def is_led(self) -> bool:
        """Whether another island is the coordinator."""
        return self.coordinator not in (None, self.me)

    def receivers(self, present: frozenset[str]) -> frozenset[str]:
        """The islands, of those in the run, that are to hear from this one that it is ready, or of its status."""
        if self.coordinator is None:
            return present
        # Who is not in the crew knows of no coordinator, and hears from this one.
        return present - frozenset(self.crew) if self.is_mine else present & {self.coordinator}


MAX_NOTICES = 1024
"""Planners whose notices are remembered: as many as there can be islands, so that liars crowd no other out."""


class PlanNotice(Message):
    """Word of the planner that it has made this plan, which then comes from island to island."""

    plan: PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)


class PlanQuery(Message):
    """Question to the planner for a plan of which it has given notice."""

    plan: PlanId


def find_branches(plan: Plan, me: str, rules: Rules) -> frozenset[str]:
    """The participants to which this one passes the plan on; of the planner: to which it sends it."""
    others = [name for name in plan.names if name != plan.planner]
    if not is_passed_on(plan, rules):
        return frozenset(others if me == plan.planner else ())
    first = rules.fan_out * (0 if me == plan.planner else 1 + others.index(me))
    return frozenset(others[first : first + rules.fan_out])


def is_passed_on(plan: Plan, rules: Rules) -> bool:
    """Whether the plan has so many participants that they pass it on."""
    return len(plan.names) > rules.tree_islands


@dataclass
class Passing:
    """What one island knows of plans that are on their way to it. Its fields hold immutable values."""

    notices: dict[str, PlanNotice] = field(default_factory=dict)
    """The last notice of each planner."""
    asked: frozenset[str] = frozenset()
    """Plans that have been on their way for a second, by id. After another second the planner is asked for them."""
    early: Plan | None = None
    """The last plan that has come before its notice."""

    def hear(self, planner: str, notice: PlanNotice) -> Plan | None:
        """The planner itself says that it has made a plan. Returns the plan if it is here already."""
        kept = {name: known for name, known in self.notices.items() if name != planner}
        self.notices = dict([*kept.items()][1 - MAX_NOTICES :]) | {planner: notice}
        return self.early if self.early is not None and self.believes(self.early) else None

    def believes(self, plan: Plan) -> bool:
        """Whether its planner has said that it has made the plan. If not, it is kept until the notice comes."""
        notice = self.notices.get(plan.planner)
        if notice is not None and notice.plan == plan.id:
            return True
        self.early = plan
        return False

    def find_missing(self, number: int) -> list[tuple[str, PlanQuery]]:
        """The questions to planners for plans of round `number` that have not come. Called each second."""
        missing = {planner: notice for planner, notice in self.notices.items() if notice.round == number}
        asked = [(planner, PlanQuery(plan=each.plan)) for planner, each in missing.items() if each.plan in self.asked]
        self.asked = frozenset(notice.plan for notice in missing.values())
        return asked

    def forget(self, planner: str) -> None:
        """The plan has come."""
        self.notices = {name: notice for name, notice in self.notices.items() if name != planner}
        self.early = None

    def end(self) -> None:
        """The round is over."""
        self.notices, self.asked, self.early = {}, frozenset(), None
