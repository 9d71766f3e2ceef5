"""Deadlines from what was measured, not from a ladder of timeouts."""

from collections import deque
from statistics import median

FLOOR_SECONDS = 10.0
SPREAD = 8.0
"""Times the median absolute deviation: far beyond noise, far below giving up on a run."""


class Deadlines:
    """Per kind of wait: median + SPREAD x MAD of the last ones, at least FLOOR_SECONDS more than their median.

    Until three waits of a kind have been measured the limit is `initial_seconds`.
    """

    def __init__(self, initial_seconds: float, history: int = 32) -> None:
        self.initial_seconds = initial_seconds
        self._history = history
        self._measured: dict[str, deque[float]] = {}

    def observe(self, kind: str, seconds: float) -> None:
        """Record how long a wait took that ended well."""
        self._measured.setdefault(kind, deque(maxlen=self._history)).append(seconds)

    def limit(self, kind: str) -> float:
        """The longest a wait of this kind may take now, in seconds."""
        measured = self._measured.get(kind, ())
        if len(measured) < 3:
            return self.initial_seconds
        middle = median(measured)
        deviation = median(abs(m - middle) for m in measured)
        return middle + max(FLOOR_SECONDS, SPREAD * deviation)
