"""How fast this island is, and how many inner steps of a round follow from it."""

import time
from collections import deque
from collections.abc import Callable
from math import inf
from statistics import median

from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.rounds import Plan

STEPS_REMEMBERED = 32


class Pace:
    """Of one rank of an island."""

    def __init__(
        self, config: OuterConfig, island: str, deadlines: Deadlines, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`now`: seconds, by which timed rounds go."""
        self._config, self._island, self._deadlines, self._now = config, island, deadlines, now
        self.num_steps = 0
        """Inner steps made by this process."""
        self._step_times: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._step_seconds: dict[str, float] = {}
        """Of each participant of the last plan, as it said itself."""
        self._committed_at: float | None = None
        self._ends_at = inf
        """By `now`: when the inner steps of a timed round are over."""

    @property
    def step_seconds(self) -> float:
        """Median time of the last inner steps on this rank; 0: not measured."""
        return median(self._step_times) if self._step_times else 0.0

    def of(self, steps: int) -> int:
        """Of a round's `steps`: all, or fewer on a slow island (2401.09135, dynamic local updates).

        max(1, floor(steps * fastest step time / own step time)), by the times in the last plan.
        """
        own = self._step_seconds.get(self._island, 0.0)
        known = [seconds for seconds in self._step_seconds.values() if seconds > 0]
        if self._config.local_steps != "dynamic" or own <= 0 or not known:
            return steps
        return max(1, int(steps * min(known) / own))

    def begin(self, steps: int) -> int:
        """The inner steps of a round begin now: at most how many of its `steps` this island makes."""
        if self._config.round_seconds is not None:
            self._ends_at = self._now() + self._config.round_seconds
        return self.of(steps)

    @property
    def seconds_left(self) -> float:
        """For inner steps of a timed round, 0 or less when no more should begin; infinite where rounds have no time."""
        return self._ends_at - self._now()

    def observe_step(self, seconds: float) -> None:
        """An inner step took so long."""
        self._step_times.append(seconds)
        self.num_steps += 1

    def observe_commit(self, plan: Plan) -> None:
        """A round is committed; the time since the last one is what going on without an island would cost it."""
        self._step_seconds = {p.island: p.step_seconds for p in plan.participants}
        now = time.monotonic()
        if self._committed_at is not None:
            self._deadlines.observe("round", now - self._committed_at)
        self._committed_at = now

    def interrupt(self) -> None:
        """This island has taken a state: the time to its next commit says nothing of a round."""
        self._committed_at = None
