"""Measures where a rank's training thread spends its time, to find the rank that delays its island.

Ranks of an island wait for each other in every inner step, so all of them take equally long. The
rank that delays the others is the one that waits least: it reads, computes, or has no processor,
while the others wait in a collective. On a GPU the training thread only enqueues work, so its waits
for the device count as waits.
"""

import time
from collections.abc import Callable, Sequence

from outer.space.ranks import RankGroup

MOST_RANKS = 32
"""Most ranks that are recorded: those that waited least."""
SCHEDSTAT = "/proc/thread-self/schedstat"
Times = list[float]
"""Seconds in inner steps; of these reading text, computing, ready without a processor.

Between steps. In which the whole process was stopped, in steps or between them.
"""


class RankTimes:
    """Adds up one rank's times. Call `begin` and `end` on the training thread, around each inner
    step.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
        ready: Callable[[], float] | None = None,
        stopped: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`ready` returns the seconds for which the thread has been ready but without a processor.

        `stopped` returns the seconds for which the whole process has been stopped.
        """
        self._stopped = stopped
        self._stopped_before = stopped()
        self._clocks = (clock, processor, ready or read_ready_seconds)
        self._began = (0.0, 0.0, 0.0)
        self._ended = clock()
        self._sums: Times = [0.0] * 6

    def begin(self) -> None:
        """Note the start of an inner step, before its text is read."""
        self._began = self._look()
        self._sums[4] += self._began[0] - self._ended

    def end(self, data_seconds: float) -> None:
        """Note the end of the step, which waited `data_seconds` for its text."""
        now = self._look()
        seconds, computing, ready = (
            after - before for after, before in zip(now, self._began, strict=True)
        )
        for place, value in enumerate((seconds, data_seconds, computing, ready)):
            self._sums[place] += value
        self._ended = now[0]

    def take(self) -> Times:
        """Return the sums since the last call, and begin new ones."""
        sums = self._sums
        stopped = self._stopped()
        # A thread that lacks a processor is late, too: what is explained is not counted twice.
        seconds, data, computing, ready, between, _ = sums
        unexplained = max(seconds + between - data - computing - ready, 0.0)
        sums[5] = min(stopped - self._stopped_before, unexplained)
        self._stopped_before = stopped
        self._sums = [0.0] * 6
        return sums

    def _look(self) -> tuple[float, float, float]:
        clock, processor, ready = self._clocks
        return clock(), processor(), ready()


def gather_times(times: RankTimes, ranks: RankGroup) -> list[list[float]]:
    """Return each rank's number and its times since the last call.

    Every rank must call it together. The list is empty for an island of one rank, in which nobody
    waits.
    """
    return [] if ranks.num_ranks == 1 else rows_of(ranks.gather(times.take()))


def rows_of(times: Sequence[Times]) -> list[list[float]]:
    """Return the rows of a RoundRecord: rank and times, rounded to milliseconds.

    If there are many ranks, only those that waited least have a row.
    """
    rows = [[float(rank), *(round(value, 3) for value in own)] for rank, own in enumerate(times)]
    return sorted(sorted(rows, key=waited)[:MOST_RANKS])


def waited(row: Sequence[float]) -> float:
    """Return how long a row's rank waited for others, less the time that others waited for it.

    In a step, a rank waits for others when it neither reads, nor computes, nor lacks a processor,
    and its process is not stopped. Between steps, the others wait for it.
    """
    _, seconds, data, computing, ready, between, stopped = row
    return seconds - data - computing - ready - between - stopped


def read_ready_seconds() -> float:
    """Return how long this thread has been ready without a processor.

    0 if the system does not report it.
    """
    try:
        with open(SCHEDSTAT) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
