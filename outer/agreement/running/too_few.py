"""What an island says, and when it ends, because only few islands take part in a round."""

import logging

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Plan
from outer.agreement.planner import TooFew
from outer.errors import QuorumError
from outer.network.deadlines import Deadlines

log = logging.getLogger(__name__)

WARN_SECONDS = 60.0


class FewIslands:
    """Watches how many islands take part in the rounds of one island."""

    def __init__(self, knowledge: Knowledge, deadlines: Deadlines) -> None:
        self._knowledge, self._deadlines = knowledge, deadlines
        self._met: set[str] = set()
        """Islands that took part in a commit and have not said goodbye."""
        self._strangers: set[str] = set()
        """Islands that began from other parameters than this one."""

    def check(self, too_few: TooFew, waited: float, warned_at: float, now: float) -> float:
        """Warn once a minute. Returns when that was last done. `waited` is in seconds.

        Raises QuorumError if the missing islands are not waited for any longer.
        """
        present, needed, seconds = too_few.present, too_few.needed, f"{waited:.0f} s"
        if too_few.is_start:
            own, live = self._knowledge.status, self._knowledge.live
            self._strangers |= {name for name, s in live.items() if s.round == 0 and not s.agrees_with(own)}
            if waited > self._deadlines.initial_seconds:
                came = f"{present} of {needed} islands came within {seconds}"
                raise QuorumError(f"round 0: {came}; outer.start_islands are needed to begin{self._explain_absence()}")
        elif self._knowledge.rules.below_quorum == "stop" and waited > self._deadlines.grace(present):
            came = f"{present} of outer.quorum {needed} islands after {seconds}"
            raise QuorumError(f"round {self._knowledge.status.round}: {came}, and outer.below_quorum is 'stop'")
        if now - warned_at <= WARN_SECONDS:
            return warned_at
        self._warn(f"BELOW QUORUM: {present} of {needed} islands came; waiting for the others{self._explain_absence()}")
        return now

    def _explain_absence(self) -> str:
        """Why there may be so few: other islands began from different parameters, or none answers."""
        if not self._strangers:
            return "" if self._knowledge.live else "; no other island answers: they are down, or have finished the run"
        return (
            f"; {', '.join(sorted(self._strangers))} began from other parameters than this island: all islands need "
            "the same seed or weights, and the same program"
        )

    def on_plan(self, plan: Plan) -> None:
        """Say so if a plan has fewer contributors than the quorum."""
        present, quorum = len(plan.contributors), self._knowledge.rules.quorum
        if present < quorum:
            self._warn(f"BELOW QUORUM: {present} of {quorum} islands; going on, for outer.below_quorum is 'continue'")

    def on_commit(self, plan: Plan) -> None:
        """Say so if those who commit are not more than half of the islands that were in the run."""
        self._met |= set(plan.names)
        total = max(len(self._met), self._knowledge.rules.start_islands)
        if 2 * len(plan.names) <= total:
            who = f"{len(plan.names)} of the {total} islands of this run ({', '.join(plan.names)})"
            self._warn(f"committed by {who}. If the others commit more without them, this round will be thrown away")

    def on_goodbye(self, island: str) -> None:
        self._met.discard(island)

    def _warn(self, text: str) -> None:
        log.warning("round %d: %s", self._knowledge.status.round, text)
