"""The pace of an island: its step times, and the number of inner steps per round that follows from
them.
"""

import time
from collections import deque
from collections.abc import Callable
from math import inf
from statistics import median

from outer.agreement.messages import Plan
from outer.config import OuterConfig
from outer.network.deadlines import Deadlines

STEPS_REMEMBERED = 32
MOST_FASTER = 16.0
"""No island counts as faster than this multiple of this island or the median one, so that a
false claim of speed does not reduce the others' work."""


class Pace:
    """The pace of the islands as one rank knows it."""

    def __init__(
        self,
        config: OuterConfig,
        island: str,
        deadlines: Deadlines,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the pace. `now`: the clock of timed rounds, in seconds."""
        self._config = config
        self._island = island
        self.deadlines = deadlines
        self._now = now
        self.num_steps = 0
        """Number of inner steps made by this process."""
        self._step_times: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._step_seconds: dict[str, float] = {}
        """Step time in seconds that each participant of the last plan reported, by island."""
        self._committed_at: float | None = None
        self._num_freezes = 0
        """Value of `Deadlines.num_freezes` at the last commit."""
        self._ends_at = inf
        """Time on the clock `now` at which the inner steps of a timed round end."""

    @property
    def step_seconds(self) -> float:
        """Median time of the last inner steps on this rank, in seconds; 0 before the first."""
        return median(self._step_times) if self._step_times else 0.0

    def of(self, steps: int) -> int:
        """Return the number of a round's `steps` that this island makes: all, or fewer if it is
        slow (2401.09135).

        Dynamic local steps: max(1, floor(steps * fastest step time / own step time)), by the times
        in the last plan. No island counts as more than MOST_FASTER times as fast as this island or
        the median one.
        """
        own = self._step_seconds.get(self._island, 0.0)
        known = [seconds for seconds in self._step_seconds.values() if seconds > 0]
        if self._config.local_steps != "dynamic" or own <= 0 or not known:
            return steps
        fastest = max(min(known), median(known) / MOST_FASTER, own / MOST_FASTER)
        return max(1, int(steps * fastest / own))

    def begin(self, steps: int) -> int:
        """Start the inner steps of a round now. Return the most of its `steps` that this island
        makes.
        """
        if self._config.round_seconds is not None:
            self._ends_at = self._now() + self._config.round_seconds
        return self.of(steps)

    @property
    def seconds_left(self) -> float:
        """Return the seconds left for inner steps of a timed round; infinite if rounds are not
        timed.
        """
        return self._ends_at - self._now()

    def observe_step(self, seconds: float) -> None:
        """Record the time of an inner step."""
        self._step_times.append(seconds)
        self.num_steps += 1

    def observe_commit(self, plan: Plan, now: float) -> None:
        """Record a commit at time `now` in seconds. The time since the last commit limits how
        long islands wait for one another.
        """
        self._step_seconds = {p.island: p.step_seconds for p in plan.participants}
        if self._committed_at is not None:
            self.deadlines.observe("round", now - self._committed_at, self._num_freezes)
        self._committed_at = now
        self._num_freezes = self.deadlines.num_freezes

    def interrupt(self) -> None:
        """Forget the time of the last commit: this island has taken a state, so its next round
        is shorter than a whole one.
        """
        self._committed_at = None
