"""Where the time of a rank's training thread goes, so that a rank that holds up its island can be named.

Ranks of an island wait for each other in every inner step, so all of them take equally long. The one that the others
wait for is the one that waits least: it reads, computes, or has no processor, while they stand in a collective. On a
GPU the training thread only enqueues work, so its waits for the device count as waits.
"""

import time
from collections.abc import Callable, Sequence

from outer.space.ranks import RankGroup

MOST_RANKS = 32
"""Of more ranks only those that waited least are recorded."""
SCHEDSTAT = "/proc/thread-self/schedstat"
Times = list[float]
"""Seconds: in inner steps; in these reading text, computing, ready without a processor; between steps."""


class RankTimes:
    """Adds up one rank's times. Call `begin` and `end` on the training thread, around each inner step."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
        ready: Callable[[], float] | None = None,
    ) -> None:
        """`ready` tells for how long the thread has been ready to run and had no processor."""
        self._clocks = (clock, processor, ready or read_ready_seconds)
        self._began, self._ended = (0.0, 0.0, 0.0), clock()
        self._sums: Times = [0.0] * 5

    def begin(self) -> None:
        """An inner step begins, with the reading of its text."""
        self._began = self._look()
        self._sums[4] += self._began[0] - self._ended

    def end(self, data_seconds: float) -> None:
        """The step has ended; it waited so long for its text."""
        now = self._look()
        seconds, computing, ready = (after - before for after, before in zip(now, self._began, strict=True))
        for place, value in enumerate((seconds, data_seconds, computing, ready)):
            self._sums[place] += value
        self._ended = now[0]

    def take(self) -> Times:
        """The sums since the last call."""
        sums, self._sums = self._sums, [0.0] * 5
        return sums

    def _look(self) -> tuple[float, float, float]:
        clock, processor, ready = self._clocks
        return clock(), processor(), ready()


def gather_times(times: RankTimes, ranks: RankGroup) -> list[list[float]]:
    """For each rank of the island its number and its times since the last call. Every rank must call it together.

    Empty for an island of one rank, in which nobody waits.
    """
    return [] if ranks.num_ranks == 1 else rows_of(ranks.gather(times.take()))


def rows_of(times: Sequence[Times]) -> list[list[float]]:
    """Rows of a RoundRecord: rank and times, in milliseconds' precision; of many ranks those that waited least."""
    rows = [[float(rank), *(round(value, 3) for value in own)] for rank, own in enumerate(times)]
    return sorted(sorted(rows, key=waited)[:MOST_RANKS])


def waited(row: Sequence[float]) -> float:
    """Seconds that the rank of a row stood in steps and neither read, nor computed, nor lacked a processor, less the
    time between steps, in which the others waited for it."""
    _, seconds, data, computing, ready, between = row
    return seconds - data - computing - ready - between


def read_ready_seconds() -> float:
    """How long this thread has been ready and had no processor; 0 where the system does not tell."""
    try:
        with open(SCHEDSTAT) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
