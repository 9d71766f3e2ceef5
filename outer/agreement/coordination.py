"""Coordination: one island collects the ready messages of a round, and its plan reaches all
participants without every island writing to every other one.

After a commit its participants (the crew) know that all of them hold the same state. In the next
round they send their ready messages to one of them, the coordinator: the fastest, by the speeds in
the last plan. The coordinator makes the plan, reports how many islands are ready, and detects lost
islands. The other islands check that the coordinator itself is alive.

An island that has not taken part in the last commit writes to all. Every island also writes to all,
until the next commit, when the coordinator is lost, slow or not coming to this round, and after a
failed attempt. A coordinator that was slow is not relied on again for some rounds.

A plan of many participants, and the list of their votes, are forwarded along a tree of islands.
Both name all participants, so the planner would send n^2 bytes if it wrote to all. Instead it is
the root of the tree, and each participant forwards what it receives to a few others, its branches.
An island accepts these messages whichever island forwards them, because they are checked:

Plan: accepted once the planner itself has announced the plan's hash (PlanNotice, to all).

VoteList: contains the signatures of all participants.

So an island that forwards messages can only withhold them. A participant that lacks the plan then
requests it from the planner (PlanQuery), and the planner sends the list to the participants that
have not acknowledged it. Both happen within two seconds.
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
    """How one island is coordinated: its crew, its coordinator, and whether it writes to all.
    Its fields hold immutable values.
    """

    me: str
    crew: tuple[str, ...] = ()
    """The participants of the last commit that have not left since. The first one coordinates;
    the next one takes its place."""
    is_direct: bool = True
    """Whether this island writes to all others in this round."""
    num_ready: int = 0
    """The number of islands that are ready for this round, as the coordinator has reported it."""
    said: int | None = None
    """The value of `num_ready` when this island was first delayed. None again once direct
    messages show that it was wrong."""
    slow: dict[str, Streak] = field(default_factory=dict)
    """Coordinators whose plans did not come in time."""

    def begin_round(self, number: int, plan: Plan | None, rules: Rules) -> None:
        """Choose the crew and the coordinator for round `number`. `plan`: the plan whose commit
        ended the last round; None if the state was taken from other islands.
        """
        is_calm = (
            plan is not None and len(plan.names) > rules.direct_islands and not rules.has_observers
        )
        speeds = (
            {p.island: p.step_seconds or float("inf") for p in plan.participants}
            if plan and is_calm
            else {}
        )
        self.crew = tuple(sorted(speeds, key=lambda name: (speeds[name], name)))
        is_slow = any(self.slow[name].until > number for name in self.crew[:1] if name in self.slow)
        self.is_direct = not is_calm or is_slow
        self.num_ready = 0
        self.said = None

    def meet(self, islands: Collection[str], rules: Rules) -> None:
        """Choose the first island by name as the coordinator before the first commit, if there are
        very many islands.

        Before the first commit no island is known to be fast. Call it again when more islands have
        joined.
        """
        has_begun = bool(self.crew) and self.is_direct
        if len(islands) > rules.tree_islands and not rules.has_observers and not has_begun:
            self.crew = tuple(sorted(islands))
            self.is_direct = False

    def turn_direct(self) -> None:
        """Write to all from now on, until the next commit."""
        self.is_direct = True
        self.num_ready = 0

    def hold_up(self) -> None:
        """Remember how many islands the coordinator has reported as ready. `compare` checks it
        against direct messages.
        """
        self.said = self.num_ready

    def compare(self, ready: Collection[str], number: int) -> None:
        """Mark the coordinator as slow if more of the crew are ready than it had reported.

        `ready`: islands that this one now knows to be ready. Islands that write to all have
        reported to the coordinator long before.
        """
        if self.said is not None and len(frozenset(self.crew) & frozenset(ready)) > self.said:
            self.said = None
            self._note_slow(self.crew[0], number)

    def hear(self, sender: str, status: Status, number: int) -> bool:
        """Record the coordinator's status in round `number`. Return False if it is not coming,
        so that it cannot be relied on.
        """
        if sender != self.coordinator:
            return True
        if status.round == number:
            self.num_ready = max(self.num_ready, status.num_ready)
        return status.is_coming

    def find_slow(self, number: int) -> None:
        """Mark the coordinator as slow in round `number`, because its plan did not come in time."""
        if self.is_led:
            self._note_slow(self.crew[0], number)

    def _note_slow(self, island: str, number: int) -> None:
        self.slow[island] = self.slow.get(island, Streak()).add(number + 1)

    def leave(self, island: str) -> None:
        """Remove an island from the crew. It has left the run, and all islands were notified."""
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
        """Return the islands among `present` to which this one sends its ready message and its
        status.
        """
        if self.coordinator is None:
            return present
        # Islands outside the crew do not know the coordinator, so the coordinator writes to them.
        return present - frozenset(self.crew) if self.is_mine else present & {self.coordinator}


MAX_NOTICES = 1024
"""The number of planners whose notices are remembered. It is the largest number of islands, so
liars cannot displace the notices of others."""


class PlanNotice(Message):
    """The planner's announcement that it has made this plan. The plan itself is forwarded from
    island to island.
    """

    plan: PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)


class PlanQuery(Message):
    """Request to the planner for a plan that it has announced."""

    plan: PlanId


def find_branches(plan: Plan, me: str, rules: Rules) -> frozenset[str]:
    """Return the participants to which this island forwards the plan, or, if it is the planner,
    sends it.
    """
    others = [name for name in plan.names if name != plan.planner]
    if not is_passed_on(plan, rules):
        return frozenset(others if me == plan.planner else ())
    first = rules.fan_out * (0 if me == plan.planner else 1 + others.index(me))
    return frozenset(others[first : first + rules.fan_out])


def is_passed_on(plan: Plan, rules: Rules) -> bool:
    """Return whether the plan has so many participants that they forward it to each other."""
    return len(plan.names) > rules.tree_islands


@dataclass
class Passing:
    """The plans that have been announced to one island and have not reached it yet. Its fields
    hold immutable values.
    """

    notices: dict[str, PlanNotice] = field(default_factory=dict)
    """The last notice of each planner."""
    asked: frozenset[str] = frozenset()
    """Ids of plans that have been missing for a second. After another second they are requested
    from their planners."""
    early: Plan | None = None
    """The last plan that arrived before its notice."""

    def hear(self, planner: str, notice: PlanNotice) -> Plan | None:
        """Record the planner's announcement of a plan. Return the plan if it has arrived
        already.
        """
        kept = {name: known for name, known in self.notices.items() if name != planner}
        self.notices = dict([*kept.items()][1 - MAX_NOTICES :]) | {planner: notice}
        return self.early if self.early is not None and self.believes(self.early) else None

    def believes(self, plan: Plan) -> bool:
        """Return whether the plan's planner has announced it. If not, keep the plan until the
        notice arrives.
        """
        notice = self.notices.get(plan.planner)
        if notice is not None and notice.plan == plan.id:
            return True
        self.early = plan
        return False

    def find_missing(self, number: int) -> list[tuple[str, PlanQuery]]:
        """Return the requests to planners for plans of round `number` that have not arrived.
        Call it every second.
        """
        missing = {
            planner: notice for planner, notice in self.notices.items() if notice.round == number
        }
        asked = [
            (planner, PlanQuery(plan=each.plan))
            for planner, each in missing.items()
            if each.plan in self.asked
        ]
        self.asked = frozenset(notice.plan for notice in missing.values())
        return asked

    def forget(self, planner: str) -> None:
        """Forget the planner's notice, because its plan has arrived."""
        self.notices = {name: notice for name, notice in self.notices.items() if name != planner}
        self.early = None

    def end(self) -> None:
        """Forget all notices and plans, because the round is over."""
        self.notices = {}
        self.asked = frozenset()
        self.early = None
