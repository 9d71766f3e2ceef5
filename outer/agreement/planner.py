"""The planner: decides which island plans an attempt at a round, and which islands take part in it.

No island is the permanent leader of the run. Every ready island applies the same rules to what it
has received:

1. If another history survives, the island must take that state first (`Behind`).
2. Islands that hold the same state agree. Islands whose data overlap, and those that made earlier
   attempts fail (suspicions.py), are excluded. If no plan is possible without them (`Hopeless`),
   they are included again.
3. If fewer islands agree than `Rules.quorum` demands, the island waits or gives up (`TooFew`).
4. The planner is the coordinator (coordination.py). Where there is none it is the first by name of
   the islands that agree or are still awaited. It fixes the plan when no live island is awaited any
   more. Once the grace period is over, the first by name of the agreeing islands plans at once. A
   planner that does not plan is passed over.

A lost island is neither counted nor awaited, so when the planner dies, the next island by name
takes over.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from outer.agreement.coordination import Coordination
from outer.agreement.knowledge import Knowledge, ReadyTable
from outer.agreement.messages import Plan, Ready, Status
from outer.agreement.rules import Behind, Rules, find_behind
from outer.agreement.suspicions import Suspicions, Votes


@dataclass(frozen=True)
class TooFew:
    """Too few islands agree for a plan. `is_start`: the run has not begun yet."""

    present: int
    needed: int
    is_start: bool


@dataclass(frozen=True)
class Hopeless:
    """So many islands are excluded that no plan is possible. `reasons`: the reason for each, by
    island.
    """

    reasons: Mapping[str, str]
    is_everyone: bool
    """Whether every island is excluded."""


@dataclass(frozen=True)
class GiveUp:
    """This island must end, because no further attempt can succeed."""

    cause: str


@dataclass(frozen=True)
class Gathering:
    """One ready island's knowledge of the others while it gathers. See `Knowledge` and
    `Suspicions`.
    """

    own: Ready
    status: Status
    rules: Rules
    live: frozenset[str]
    """Other islands in the run that are not lost."""
    reported: frozenset[str]
    statuses: Mapping[str, Status]
    """Last known status of the live islands, by island."""
    readies: ReadyTable
    weigh: Callable[[Status], int]
    """The function `Knowledge.weigh`."""
    coordination: Coordination
    excluded: Mapping[str, str]
    """Islands that are left out because of earlier attempts at this round, with the reason."""
    left_out: Callable[[int], frozenset[str]] = lambda attempt: frozenset()
    """Function from an attempt's number to the islands that are left out of it in turn, because
    many attempts have failed."""
    passed_over: frozenset[str] = frozenset()
    """Islands that should have made a plan and did not make it in time."""

    def decide(
        self, *, is_late: bool, is_patient: bool
    ) -> Plan | Behind | TooFew | Hopeless | None:
        """Return the plan if this island is the planner and may fix it now, a reason against
        planning, or None to wait.

        `is_late`: the grace period is over. `is_patient`: observers still have time to finish their
        inner steps.
        """
        me = self.own.island
        is_settled = is_late or not self.absent
        if behind := find_behind(me, self.status, self.statuses, self.weigh, is_settled=is_settled):
            return behind
        # No plan is made while other islands are awaited, so the slow search for overlapping data
        # is skipped until then.
        agreeing = self._find_agreeing() if is_settled else self._same_state
        if me not in agreeing:
            return None  # The others continue without this island. It takes their state afterwards.
        allowed = {name: ready for name, ready in agreeing.items() if name not in self.excluded}
        if is_settled and self._is_hopeless(allowed, agreeing, is_late=is_late):
            return Hopeless(self.excluded, is_everyone=not allowed)
        if me not in allowed:
            return None
        if too_few := self._check_quorum(allowed, is_settled=is_settled):
            return too_few
        chosen = self._choose(allowed)
        if self._find_planner(chosen, is_late=is_late) != me or not is_settled:
            return None
        if self._is_early(chosen.values(), is_patient=is_patient):
            return None
        participants = [chosen[name] for name in sorted(chosen)]
        attempt = max(p.attempt for p in participants)
        return Plan(round=self.status.round, attempt=attempt, planner=me, participants=participants)

    def find_planner(self, *, is_late: bool) -> str | None:
        """Return the island whose plan this island waits for, or None while other islands are
        awaited.
        """
        if self.coordination.is_led:
            return (
                self.coordination.coordinator
                if self.coordination.num_ready > len(self.live)
                else None
            )
        if self.absent and not is_late:
            return None
        allowed = {
            name: ready
            for name, ready in self._find_agreeing().items()
            if name not in self.excluded
        }
        if not allowed:
            return None
        return self._find_planner(self._choose(allowed), is_late=is_late)

    @cached_property
    def ready(self) -> dict[str, Ready]:
        """Ready messages for this round that can be used in a plan, by island, this island's own
        included.
        """
        return self.readies.usable(self.own.round, self.live) | {self.own.island: self.own}

    @cached_property
    def absent(self) -> frozenset[str]:
        """Islands worth waiting for: they live, are not ready, are not excluded, and have not
        reported that they are not coming.
        """
        return self._find_absent(self.ready) - self.excluded.keys()

    def is_out_of_turn(self, plan: Plan) -> bool:
        """Return whether the planner is left out of this attempt, so that its plan is refused."""
        left_out = self.left_out(plan.attempt)
        allowed = {
            name: ready
            for name, ready in self._find_agreeing().items()
            if name not in self.excluded
        }
        return plan.planner in left_out and self._suffice(
            {n: r for n, r in allowed.items() if n not in left_out}
        )

    def _choose(self, allowed: Mapping[str, Ready]) -> Mapping[str, Ready]:
        """Return the participants: the allowed islands, without those left out in turn if enough
        islands remain.
        """
        left_out = self.left_out(max(ready.attempt for ready in allowed.values()))
        rest = {name: ready for name, ready in allowed.items() if name not in left_out}
        return rest if self._suffice(rest) else allowed

    def _find_planner(self, chosen: Mapping[str, Ready], *, is_late: bool) -> str:
        waited_for = set(chosen) if is_late else set(chosen) | self.absent
        if (coordinator := self.coordination.coordinator) in waited_for:
            return coordinator
        return min(waited_for - self.passed_over or chosen)

    def _is_hopeless(
        self, allowed: Mapping[str, Ready], agreeing: Mapping[str, Ready], *, is_late: bool
    ) -> bool:
        is_waiting_in_vain = is_late and self.own.island not in allowed
        return is_waiting_in_vain or (self._suffice(agreeing) and not self._suffice(allowed))

    def _suffice(self, islands: Mapping[str, Ready]) -> bool:
        return len(islands) >= (
            1 if self.rules.below_quorum == "continue" else max(1, self.rules.quorum)
        )

    def _find_absent(self, ready: Mapping[str, Ready]) -> frozenset[str]:
        """Return the islands worth waiting for: they live, are not ready, and have not reported
        that they are not coming.

        Islands that claim another state and have not proved it yet are among them.
        """
        unproved = frozenset(
            name for name in self.live & self.reported if name not in self.statuses
        )
        return unproved | frozenset(
            name
            for name in self.live - frozenset(ready) - unproved
            if name not in self.reported or self.statuses[name].is_coming
        )

    @cached_property
    def _same_state(self) -> dict[str, Ready]:
        """Ready messages of the islands that hold this island's state."""
        return {name: r for name, r in self.ready.items() if r.digest == self.own.digest}

    def _find_agreeing(self) -> dict[str, Ready]:
        """Ready messages of the islands that hold this island's state and whose data do not
        overlap.
        """
        agreeing = self._same_state
        refused = self.rules.find_refusals([agreeing[name] for name in sorted(agreeing)])
        return {name: r for name, r in agreeing.items() if name not in refused}

    def _check_quorum(self, agreeing: Mapping[str, Ready], *, is_settled: bool) -> TooFew | None:
        num_ready = len(agreeing)
        rules = self.rules
        # The first plan of a run proves that all starting islands have joined. Later a lost one is
        # not waited for.
        is_start = self.status.round == 0 and self.readies.next_attempt(self.own.island, 0) == 0
        if is_start and num_ready < rules.start_islands:
            return TooFew(num_ready, rules.start_islands, is_start=True)
        may_continue = rules.below_quorum == "continue" and is_settled
        return (
            None
            if num_ready >= rules.quorum or may_continue
            else TooFew(num_ready, rules.quorum, is_start=False)
        )

    def _is_early(self, agreeing: Collection[Ready], *, is_patient: bool) -> bool:
        """Return whether to wait for observers to become contributors: while `is_patient`, or
        while contributors are fewer than the quorum.
        """
        num_contributors = sum(not ready.listens for ready in agreeing)
        return num_contributors < len(agreeing) and (
            is_patient or num_contributors < self.rules.quorum
        )


def build_gathering(
    own: Ready,
    knowledge: Knowledge,
    readies: ReadyTable,
    coordination: Coordination,
    suspicions: Suspicions,
    votes: Votes,
) -> Gathering:
    """Collect one island's knowledge of the others for its gathering. `own`: its ready message."""
    judged = knowledge.judge_claims()
    excluded = suspicions.excluded(knowledge.status.round, votes) if judged.awaited else {}
    return Gathering(
        own,
        knowledge.status,
        knowledge.rules,
        judged.awaited,
        knowledge.reported,
        judged.live,
        readies,
        knowledge.weigh,
        coordination,
        excluded,
        suspicions.left_out,
        suspicions.passed_over,
    )
