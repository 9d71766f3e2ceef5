"""Deadlines derived from measured waits, instead of a fixed ladder of timeouts."""

from statistics import median

SPREAD = 8.0
"""Factor on the median absolute deviation (MAD): well above noise, but short compared with
giving up on a run."""
FLOORS = {"reduce": 10.0, "call": 3.0, "grace": 3.0}
"""Smallest margin of a limit above the median, in seconds, by kind of wait."""
DEFAULT_FLOOR_SECONDS = 10.0
MAX_SECONDS = {"call": 10.0}
"""Upper bound of any limit, by kind of wait."""
MAX_GROWTH = 2.0
"""A limit is at most this many times the longest wait that succeeded, plus its margin."""
MAX_PATIENCE = 2.0
"""Most rounds for whose duration islands are waited for because they have missed earlier rounds."""
MAX_FIRST_SECONDS = {"call": 5.0}
"""Upper bound of `initial_seconds`, the limit until three waits of a kind have been measured, by
kind.
"""


class Deadlines:
    """Limits for waits, by kind: median + max(floor, SPREAD x MAD) of the last `history` waits.

    A wait in which this process stood still measures the freeze, so it is discarded: see
    `num_freezes`.
    """

    def __init__(self, initial_seconds: float, history: int = 32) -> None:
        self.initial_seconds = initial_seconds
        self._history = history
        self._measured: dict[
            str, tuple[float, ...]
        ] = {}  # Replaced as a whole, because several threads read it.
        self._limits: dict[str, tuple[tuple[float, ...], float]] = {}
        """By kind: the measured waits, and the limit that follows from them."""
        self.num_freezes = 0
        """Freezes of this process so far. The failure detector counts them."""

    def observe(self, kind: str, seconds: float, num_freezes: int | None = None) -> None:
        """Record the duration of a successful wait, unless this process has frozen since the wait
        began.

        `num_freezes`: the value of the attribute of that name when the wait began.
        """
        if num_freezes is not None and num_freezes != self.num_freezes:
            return
        self._measured[kind] = (*self._measured.get(kind, ()), seconds)[-self._history :]

    def typical(self, kind: str) -> float | None:
        """Return the median of the last waits of a kind, in seconds, or None until three have
        been measured.
        """
        measured = self._measured.get(kind, ())
        return median(measured) if len(measured) >= 3 else None

    def limit(self, kind: str) -> float:
        """Return the longest time that a wait of this kind may take now, in seconds."""
        measured = self._measured.get(kind, ())
        if len(measured) < 3:
            return min(self.initial_seconds, MAX_FIRST_SECONDS.get(kind, self.initial_seconds))
        known, limit = self._limits.get(kind, ((), 0.0))
        if known is not measured:
            limit = _find_limit(kind, measured)
            self._limits[kind] = measured, limit
        return limit

    def grace(self, num_waiting: int, num_absent: int = 1, num_missed: int = 1) -> float:
        """Return the seconds that `num_waiting` islands wait for `num_absent` islands that live but
        are not ready.

        Waiting costs `num_waiting` times the wait, and continuing without the others costs a round
        of each of the `num_absent` islands. `num_missed`: missed rounds by which the wait is
        lengthened, up to MAX_PATIENCE. The floor prevents noise in short rounds from costing an
        island a round.
        """
        if (a_round := self.typical("round")) is None:
            return self.initial_seconds
        share = max(num_absent, 1) / max(num_waiting, 1)
        return max(FLOORS["grace"], a_round * max(share, min(share * num_missed, MAX_PATIENCE)))


def _find_limit(kind: str, measured: tuple[float, ...]) -> float:
    middle = median(measured)
    floor = FLOORS.get(kind, DEFAULT_FLOOR_SECONDS)
    deviation = median(abs(m - middle) for m in measured)
    limit = min(middle + max(floor, SPREAD * deviation), MAX_GROWTH * max(measured) + floor)
    return min(limit, MAX_SECONDS.get(kind, limit))
