"""Deadlines from what was measured, not from a ladder of timeouts."""

from collections import deque
from statistics import median

SPREAD = 8.0
"""Times the median absolute deviation: far beyond noise, far below giving up on a run."""
FLOORS = {"reduce": 10.0, "call": 3.0, "grace": 3.0}
"""By kind of wait, in seconds: a limit is at least so much more than the median."""
DEFAULT_FLOOR_SECONDS = 10.0
MAX_FIRST_SECONDS = {"call": 5.0}
"""Of a kind that has not been measured yet; others get the run's `wait_seconds`."""


class Deadlines:
    """Per kind of wait: median + max(floor, SPREAD x MAD) of the last ones.

    Until three waits of a kind have been measured the limit is `initial_seconds`, or less in MAX_FIRST_SECONDS.
    """

    def __init__(self, initial_seconds: float, history: int = 32) -> None:
        self.initial_seconds = initial_seconds
        self._history = history
        self._measured: dict[str, deque[float]] = {}

    def observe(self, kind: str, seconds: float) -> None:
        """Record how long a wait took that ended well."""
        self._measured.setdefault(kind, deque(maxlen=self._history)).append(seconds)

    def typical(self, kind: str) -> float | None:
        """The median of the last waits of a kind, in seconds; None until three have been measured."""
        measured = self._measured.get(kind, ())
        return median(measured) if len(measured) >= 3 else None

    def limit(self, kind: str) -> float:
        """The longest a wait of this kind may take now, in seconds."""
        middle = self.typical(kind)
        if middle is None:
            return min(self.initial_seconds, MAX_FIRST_SECONDS.get(kind, self.initial_seconds))
        deviation = median(abs(m - middle) for m in self._measured[kind])
        return middle + max(FLOORS.get(kind, DEFAULT_FLOOR_SECONDS), SPREAD * deviation)

    def grace(self, num_waiting: int, num_absent: int = 1) -> float:
        """How long `num_waiting` islands wait for `num_absent` that live but are not ready, in seconds.

        Waiting costs `num_waiting` x that time; going on without them costs `num_absent` islands' rounds. The floor
        keeps noise in short rounds from costing anybody a round.
        """
        a_round = self.typical("round")
        if a_round is None:
            return self.initial_seconds
        return max(FLOORS["grace"], a_round * max(num_absent, 1) / max(num_waiting, 1))
