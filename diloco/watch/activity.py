"""What a rank's training thread is doing now, and how long that may take."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from outer.deadlines import Deadlines

FIRST_SECONDS = 1500.0
"""Of the first pieces of work of a kind, which compile and fill caches. Less than ranks wait in a collective."""
FLOOR_SECONDS = 300.0
"""A piece of work may take at least so much longer than the last ones: no hang is found sooner."""


@dataclass(frozen=True)
class Work:
    """`limit_seconds` is None while other deadlines bound it."""

    kind: str
    limit_seconds: float | None


class Heartbeat:
    """The training thread begins one piece of work after the other; another thread may look at `work`."""

    def __init__(self, limit_seconds: float | None = None, clock: Callable[[], float] = monotonic) -> None:
        """`limit_seconds`: of each piece of work but the first; None: by the times of the last ones of its kind."""
        self._fixed, self._clock = limit_seconds, clock
        self._deadlines = Deadlines(FIRST_SECONDS)
        self._began_at = clock()
        self.work = Work("setting up", None)
        """A new object for each piece of work."""

    def begin(self, kind: str) -> None:
        """The work before is done, and the next piece has begun."""
        self._end()
        self.work = Work(kind, self._limit(kind))

    def rest(self, kind: str) -> None:
        """The work before is done; what follows, a round's wait for other islands, has deadlines of its own."""
        self._end()
        self.work = Work(kind, None)

    def _end(self) -> None:
        now = self._clock()
        if self.work.limit_seconds is not None:
            self._deadlines.observe(self.work.kind, now - self._began_at)
        self._began_at = now

    def _limit(self, kind: str) -> float:
        """Median + k x MAD + FLOOR_SECONDS of the last ones, when three have been measured."""
        if self._deadlines.typical(kind) is None:
            return max(FIRST_SECONDS, self._fixed or 0.0)
        return self._fixed or FLOOR_SECONDS + self._deadlines.limit(kind)
