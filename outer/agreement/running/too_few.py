"""Warnings of an island, and errors that end it, when few islands take part in a round."""

import logging
from collections.abc import Callable, Sequence

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Plan
from outer.agreement.planner import TooFew
from outer.errors import QuorumError
from outer.network.deadlines import Deadlines

log = logging.getLogger(__name__)

WARN_SECONDS = 60.0
NAMED = 8
"""The number of islands with other parameters to name, so that a stranger with many names does
not fill the log."""


class FewIslands:
    """Watches how many islands take part in this island's rounds."""

    def __init__(
        self, knowledge: Knowledge, deadlines: Deadlines, why_unseen: Callable[[], str] = lambda: ""
    ) -> None:
        """Create a watcher. `why_unseen`: returns the reason why other islands' records may be
        invisible here, or "".
        """
        self._knowledge = knowledge
        self._deadlines = deadlines
        self._why_unseen = why_unseen
        self._met: set[str] = set()
        """Islands that took part in a commit and have not said goodbye."""
        self._strangers: dict[str, str] = {}
        """Digests of the islands that begin with other parameters than this one, by island."""
        self._told: set[str] = set()
        """Islands with other parameters about which a warning was logged."""

    def hear(self, island: str) -> None:
        """Warn, once per island, if an island from which a message has arrived begins with other
        parameters than this one.
        """
        own = self._knowledge.status
        theirs = self._knowledge.statuses.get(island)
        if theirs is None or not (
            own.is_start and own.is_coming and theirs.is_start and theirs.is_coming
        ):
            return
        if theirs.agrees_with(own):
            self._strangers.pop(island, None)
            return
        if island in self._told:
            self._strangers[island] = theirs.digest
        elif len(self._told) < NAMED:
            self._told.add(island)
            self._strangers[island] = theirs.digest
            self._warn(self._name_strangers([island]))

    def check(self, too_few: TooFew, waited: float, warned_at: float, now: float) -> float:
        """Warn once per minute. Return the time of the last warning. `waited` is in seconds.

        Raises QuorumError when the missing islands are not waited for any longer.
        """
        present = too_few.present
        needed = too_few.needed
        seconds = f"{waited:.0f} s"
        if too_few.is_start:
            if waited > self._deadlines.initial_seconds:
                came = f"{present} of {needed} islands were here within {seconds}"
                raise QuorumError(
                    f"round 0: {came}; outer.start_islands are needed to "
                    f"begin{self._explain_absence()}"
                )
        elif self._knowledge.rules.below_quorum == "stop" and waited > self._deadlines.grace(
            present
        ):
            came = f"{present} of outer.quorum {needed} islands after {seconds}"
            raise QuorumError(
                f"round {self._knowledge.status.round}: {came}, and outer.below_quorum is 'stop'"
            )
        if now - warned_at <= WARN_SECONDS:
            return warned_at
        self._warn(
            f"BELOW QUORUM: {present} of {needed} islands are here; waiting for the "
            f"others{self._explain_absence()}"
        )
        return now

    def _explain_absence(self) -> str:
        """Return why there may be so few islands: others began from different parameters, or
        none answers.
        """
        if why := self._why_unseen():
            return f"; {why}"
        if not (self._strangers and self._knowledge.status.is_start):
            return (
                ""
                if self._knowledge.live
                else "; no other island answers: they are down, or have finished the run"
            )
        return f"; {self._name_strangers(sorted(self._strangers))}"

    def _name_strangers(self, islands: Sequence[str]) -> str:
        """Return which islands began with other parameters, with both digests, and the three
        cures.
        """
        digests = ", ".join(f"{name} with digest {self._strangers[name][:12]}" for name in islands)
        return (
            f"{digests} and this island with {self._knowledge.status.digest[:12]} begin with other "
            "parameters, and cannot average them. Start the islands again: with the same seed, set "
            "before the model and its adapters are made; or with the same weights "
            "(model.init_from, or one checkpoint that all of them load); or one of them alone "
            "(outer.start_islands=1) and the others with island.joins=true, which take its weights"
        )

    def on_plan(self, plan: Plan) -> None:
        """Warn if a plan has fewer contributors than the quorum."""
        present = len(plan.contributors)
        quorum = self._knowledge.rules.quorum
        if present < quorum:
            self._warn(
                f"BELOW QUORUM: {present} of {quorum} islands; outer.below_quorum is 'continue'"
            )

    def on_commit(self, plan: Plan) -> None:
        """Warn if the islands that commit are not more than half of the islands that were in the
        run.
        """
        self._met |= set(plan.names)
        total = max(len(self._met), self._knowledge.rules.start_islands)
        if 2 * len(plan.names) <= total:
            who = f"{len(plan.names)} of the {total} islands of this run ({', '.join(plan.names)})"
            self._warn(
                f"committed by {who}. If the others commit more without them, this round will be "
                "thrown away"
            )

    def on_goodbye(self, island: str) -> None:
        self._met.discard(island)

    def _warn(self, text: str) -> None:
        log.warning("round %d: %s", self._knowledge.status.round, text)
