"""Measures how long the contributors to a round have waited for other islands, and when they
continue without them.

Contributors wait for islands that are not ready for the time of `Deadlines.grace`. An island may
need longer than the others' inner steps to take what they have committed. It would then come too
late for ever. So contributors wait longer for an island that has missed 2, 4, 8, ... rounds in a
row, in proportion to that number.

Observers miss nothing when a round continues without their progress, so contributors wait for them
only for the duration of `Rules.grace_steps` inner steps.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Plan, Ready
from outer.agreement.running.limits import held_up_limit
from outer.agreement.state_machine import RoundProtocol
from outer.network.deadlines import Deadlines

log = logging.getLogger(__name__)


@dataclass
class MissedRounds:
    """Counts the rounds in a row that were committed without an island although it was coming to
    them.
    """

    knowledge: Knowledge
    _counts: dict[str, int] = field(default_factory=dict)

    def on_commit(self, plan: Plan) -> None:
        """Count a missed round for each island that was coming and is not in this committed
        plan.
        """
        coming = {name for name, status in self.knowledge.live.items() if status.is_coming}
        self._counts = {
            name: self._counts.get(name, 0) + 1 for name in coming.difference(plan.names)
        }

    def to_make_good(self, absent: Collection[str]) -> int:
        """Return the number of missed rounds by which to lengthen the wait for these islands, at
        least 1.

        It is above 1 only after 2, 4, 8 ... missed rounds, so that an island that never comes at
        most doubles the total wait.
        """
        missed = [count for name, count in self._counts.items() if name in absent]
        return max((count for count in missed if count.bit_count() == 1), default=1)


def find_ready(protocol: RoundProtocol, awaited: frozenset[str]) -> list[Ready]:
    """Return the latest ready messages of these islands for this island's round."""
    number = protocol.knowledge.status.round
    return [
        ready
        for name, ready in protocol.readies.latest.items()
        if name in awaited and ready.round == number
    ]


def find_contributors(protocol: RoundProtocol) -> list[Ready]:
    """Return the ready messages of the other islands that may take part and are not observers."""
    return [
        ready for ready in find_ready(protocol, protocol.knowledge.awaited) if not ready.listens
    ]


class GraceTimer:
    """Waiting time of one gathering. Times are in seconds on the event loop's clock."""

    def __init__(self, protocol: RoundProtocol, deadlines: Deadlines, missed: MissedRounds) -> None:
        self._protocol = protocol
        self._deadlines = deadlines
        self._missed = missed
        self._since: float | None = None
        self._is_direct = protocol.coordination.is_direct
        self._num_absent = self._num_contributors = 0
        self._num_missed = 1
        self._step_seconds = 0.0
        """Duration of an inner step of the fastest contributor."""
        self.waited = 0.0
        """Seconds since the first contributor was ready, or since this process woke from a
        freeze if that was later."""

    def update(self, now: float, woke_at: float) -> None:
        """Update the waiting time at `now` from the ready messages. `woke_at`: end of this
        process's last freeze.
        """
        self._count()
        is_direct = self._protocol.coordination.is_direct
        if is_direct and not self._is_direct:
            # The others' ready messages went to the coordinator and are still to come here.
            self._since = None
        self._is_direct = is_direct
        if self._since is None and self._num_contributors:
            self._since = now
        self.waited = 0.0 if self._since is None else now - max(self._since, woke_at)

    @property
    def is_late(self) -> bool:
        """Return whether the grace period is over: islands that are not ready are no longer
        waited for.
        """
        grace = self._deadlines.grace(
            max(1, self._num_contributors), self._num_absent, self._num_missed
        )
        return self.waited > grace

    @property
    def seconds_left(self) -> float:
        """Return the seconds for which contributors still wait for observers to finish their
        inner steps.
        """
        return max(
            0.0, self._protocol.knowledge.rules.grace_steps * self._step_seconds - self.waited
        )

    def _count(self) -> None:
        awaited = self._protocol.knowledge.awaited
        own = self._protocol.own
        ready = find_ready(self._protocol, awaited)
        num_ready = self._protocol.coordination.num_ready
        contributors = [each for each in [*ready, *([own] if own else [])] if not each.listens]
        self._num_absent = max(0, len(awaited) + 1 - max(len(ready) + 1, num_ready))
        self._num_contributors = max(len(contributors), num_ready)
        self._num_missed = self._missed.to_make_good(
            awaited.difference(each.island for each in ready)
        )
        self._step_seconds = min((each.step_seconds for each in contributors), default=0.0)


class HeldUpTimer:
    """Sets `Knowledge.is_held_up` when an island has been ready for a round for longer than
    honest islands need.
    """

    def __init__(self, knowledge: Knowledge, deadlines: Deadlines) -> None:
        self._knowledge = knowledge
        self._deadlines = deadlines
        self._round = -1
        self._since = 0.0

    def update(self, now: float, woke_at: float) -> None:
        """Update the flag. Call it while the island gathers. `now` and `woke_at` are as in
        `GraceTimer.update`.
        """
        number = self._knowledge.status.round
        if number != self._round:
            self._round = number
            self._since = now
        waited = now - max(self._since, woke_at)
        is_held_up = waited > held_up_limit(self._deadlines)
        if is_held_up and not self._knowledge.is_held_up:
            log.info(
                "round %d: delayed for %.0f s; claims of unknown islands count from now on",
                number,
                waited,
            )
        self._knowledge.is_held_up = is_held_up
