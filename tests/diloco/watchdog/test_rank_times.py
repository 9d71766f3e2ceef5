"""Where the time of a rank went, and which rank the others waited for."""

import pytest

from diloco.watchdog.rank_times import MOST_RANKS, RankTimes, read_ready_seconds, rows_of


class Clocks:
    """Clocks that a test moves: of the wall, of the processor, and of being ready without one."""

    def __init__(self) -> None:
        self.now = self.cpu = self.ready = self.stopped = 0.0
        self.times = RankTimes(
            lambda: self.now, lambda: self.cpu, lambda: self.ready, lambda: self.stopped
        )

    def step(self, seconds: float, cpu: float, ready: float = 0.0, data: float = 0.0) -> None:
        self.times.begin()
        self.now, self.cpu, self.ready = self.now + seconds, self.cpu + cpu, self.ready + ready
        self.times.end(data)


def test_times_are_those_of_the_steps_and_of_what_was_between_them() -> None:
    clocks = Clocks()
    clocks.step(2.0, cpu=1.0, ready=0.5, data=0.25)
    clocks.now += 3.0
    clocks.step(4.0, cpu=1.5)
    assert clocks.times.take() == [6.0, 0.25, 2.5, 0.5, 3.0, 0.0]
    assert clocks.times.take() == [0.0] * 6


def test_of_many_ranks_those_that_waited_least_are_told_in_order() -> None:
    times = [[10.0, 0.0, float(rank % 50) / 10, 0.0, 0.0, 0.0] for rank in range(200)]
    rows = rows_of(times)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows) and len(rows) == MOST_RANKS
    assert min(row[3] for row in rows) >= 4.2


SLOW = {
    "computing": [10.0, 0.0, 9.0, 0.0, 1.0, 0.0],
    "between": [8.0, 0.0, 2.0, 0.0, 5.0, 0.0],
    "stopped": [10.0, 0.0, 2.0, 0.0, 1.0, 6.0],
}


@pytest.mark.parametrize("behind", SLOW)
def test_a_rank_that_computes_comes_late_or_is_stopped_waits_least(behind: str) -> None:
    others = [[10.0, 0.0, 2.0, 0.0, 1.0, 0.0]] * (MOST_RANKS + 4)
    assert [0.0, *SLOW[behind]] in rows_of([SLOW[behind], *others])


def test_time_in_which_the_process_was_stopped_is_not_a_wait() -> None:
    clocks = Clocks()
    clocks.stopped = 5.5
    clocks.step(8.0, cpu=1.0)
    assert clocks.times.take() == [8.0, 0.0, 1.0, 0.0, 0.0, 5.5]
    clocks.stopped += 3.0
    clocks.step(4.0, cpu=1.0, ready=2.5)
    assert clocks.times.take()[5] == 0.5, "the rest was a lack of processors"


def test_the_system_tells_how_long_a_thread_was_ready() -> None:
    assert read_ready_seconds() >= 0.0
