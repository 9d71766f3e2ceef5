"""The planner: decides which island plans an attempt at a round, and which islands take part in it.

No island is the permanent leader of the run. Every ready island applies the same rules to what it has received:

1. If another history survives, the island must take that state first (`Behind`).
2. Islands that hold the same state agree. Accused islands, and islands whose data overlap, are excluded.
3. If fewer islands agree than `Rules.quorum` demands, the island waits or gives up (`TooFew`).
4. The planner is the first by name of the islands that agree or are still awaited. It fixes the plan when no live
   island is awaited any more. Once the grace period is over, the first by name of the agreeing islands plans at once.

A lost island is neither counted nor awaited, so when the planner dies, the next island by name takes over.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from outer.agreement.messages import Plan, Ready, Status
from outer.agreement.readiness import ReadyTable
from outer.agreement.rules import Behind, Rules, find_behind


@dataclass(frozen=True)
class TooFew:
    """Too few islands for a plan. `is_start`: the run has not begun yet."""

    present: int
    needed: int
    is_start: bool


@dataclass(frozen=True)
class Gathering:
    """Knowledge of one ready island about the others while it gathers. See RoundProtocol for the fields."""

    own: Ready
    status: Status
    rules: Rules
    live: frozenset[str]
    """Other islands in the run that are not lost."""
    reported: frozenset[str]
    statuses: Mapping[str, Status]
    """Last known status of the live islands, by island."""
    readies: ReadyTable
    accused: frozenset[str]
    """Islands excluded from this round because their payloads could not be used, or because they accuse too many."""

    def decide(self, *, is_late: bool, is_patient: bool) -> Plan | Behind | TooFew | None:
        """The plan if this island is the planner and may fix it now, a reason against planning, or None to wait.

        `is_late`: the grace period is over. `is_patient`: observers still have time to finish their inner steps.
        """
        me, ready = self.own.island, self.readies.usable(self.own.round, self.live) | {self.own.island: self.own}
        absent = self._find_absent(ready)
        if behind := find_behind(me, self.status, self.statuses, is_settled=is_late or not absent):
            return behind
        agreeing = self._find_agreeing(ready)
        if me not in agreeing:
            return None  # The others go on without this island. It takes their state afterwards.
        if too_few := self._check_quorum(agreeing, is_late=is_late):
            return too_few
        planner = min(agreeing) if is_late else min(set(agreeing) | absent)
        if planner != me or (absent and not is_late) or self._is_early(agreeing.values(), is_patient=is_patient):
            return None
        participants = [agreeing[name] for name in sorted(agreeing)]
        attempt = max(p.attempt for p in participants)
        return Plan(round=self.status.round, attempt=attempt, planner=me, participants=participants)

    def _find_absent(self, ready: Mapping[str, Ready]) -> frozenset[str]:
        """Islands worth waiting for: they live, are not ready, and have not said that they are not coming."""
        return frozenset(
            name for name in self.live - frozenset(ready) if name not in self.reported or self.statuses[name].is_coming
        )

    def _find_agreeing(self, ready: Mapping[str, Ready]) -> dict[str, Ready]:
        """Ready messages of the islands that hold this island's state and are not excluded."""
        agreeing = {name: r for name, r in ready.items() if r.digest == self.own.digest and name not in self.accused}
        refused = self.rules.find_refusals([agreeing[name] for name in sorted(agreeing)])
        return {name: r for name, r in agreeing.items() if name not in refused}

    def _check_quorum(self, agreeing: Mapping[str, Ready], *, is_late: bool) -> TooFew | None:
        num_ready, rules = len(agreeing), self.rules
        # The first plan of a run proves that all islands of the start have come. Later a lost one is not waited for.
        is_start = self.status.round == 0 and self.readies.next_attempt(self.own.island, 0) == 0
        if is_start and num_ready < rules.start_islands:
            return TooFew(num_ready, rules.start_islands, is_start=True)
        may_continue = rules.below_quorum == "continue" and (is_late or not self._find_absent(agreeing))
        return None if num_ready >= rules.quorum or may_continue else TooFew(num_ready, rules.quorum, is_start=False)

    def _is_early(self, agreeing: Collection[Ready], *, is_patient: bool) -> bool:
        """Whether to wait for observers to become contributors: while `is_patient`, or below the quorum."""
        num_contributors = sum(not ready.listens for ready in agreeing)
        return num_contributors < len(agreeing) and (is_patient or num_contributors < self.rules.quorum)
