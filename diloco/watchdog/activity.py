"""Tracks what a rank's training thread is doing now and how long that may take."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from outer.network.deadlines import Deadlines

FIRST_SECONDS = 1500.0
"""Limit of the first pieces of work of a kind, which compile and fill caches.

It is below the time-out of collectives.
"""
FLOOR_SECONDS = 300.0
"""Least time by which work must exceed its usual time before it counts as a hang."""


@dataclass(frozen=True)
class Work:
    """A piece of work. `limit_seconds` is None if other deadlines apply to it."""

    kind: str
    limit_seconds: float | None
    has_beats: bool = False
    """Whether the limit is for the time without a sign of life (`beat`), not for all work."""


class ActivityMonitor:
    """Holds the current work of the training thread. Any thread may read `work`."""

    def __init__(
        self, limit_seconds: float | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        """`limit_seconds` applies to all work but the first of a kind.

        None derives it from recent times.
        """
        self._fixed = limit_seconds
        self._clock = clock
        self._deadlines = Deadlines(FIRST_SECONDS)
        self._began_at = clock()
        self.work = Work("setting up", None)
        """The current work; each piece is a new object."""
        self.num_beats = 0
        """Number of signs of life so far."""
        self.stopped_seconds = 0.0
        """Seconds so far in which the whole process was stopped, as the watchdog's thread found."""

    def start(self, kind: str) -> None:
        """End the current work and start the next piece."""
        self._end()
        self.work = Work(kind, self._limit(kind))

    def start_untimed(self, kind: str) -> None:
        """End the current work and start work with its own deadlines, such as waiting for
        islands.
        """
        self._end()
        self.work = Work(kind, None)

    def start_beating(self, kind: str, longest_seconds: float) -> None:
        """End the current work and start work that may last as long as it shows signs of life.

        `longest_seconds` is its longest wait that has a deadline of its own and shows no sign of
        life.
        """
        self._end()
        self.work = Work(kind, longest_seconds + (self._fixed or FLOOR_SECONDS), has_beats=True)

    def beat(self) -> None:
        """Note a sign of life of the current work. Any thread may call it."""
        self.num_beats += 1

    @property
    def now(self) -> tuple[str, float]:
        """The kind of the current work, and for how many seconds it has lasted."""
        return self.work.kind, self._clock() - self._began_at

    def _end(self) -> None:
        now = self._clock()
        if self.work.limit_seconds is not None and not self.work.has_beats:
            self._deadlines.observe(self.work.kind, now - self._began_at)
        self._began_at = now

    def _limit(self, kind: str) -> float:
        """Return the limit of work of this kind, in seconds.

        It is the median + k x MAD + FLOOR_SECONDS of the last times, once three have been measured.
        """
        if self._deadlines.typical(kind) is None:
            return max(FIRST_SECONDS, self._fixed or 0.0)
        return self._fixed or FLOOR_SECONDS + self._deadlines.limit(kind)
