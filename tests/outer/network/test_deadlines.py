"""Deadlines follow the measured waits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outer.network.deadlines import (
    DEFAULT_FLOOR_SECONDS,
    FLOORS,
    MAX_FIRST_SECONDS,
    SPREAD,
    Deadlines,
)


def test_more_islands_are_waited_for_longer():
    deadlines = Deadlines(600.0)
    for _ in range(3):
        deadlines.observe("round", 60.0)
    assert deadlines.grace(num_waiting=1, num_absent=2) == 120.0
    assert deadlines.grace(num_waiting=3, num_absent=1) == 20.0


def make_deadlines(*seconds: float, kind: str = "reduce", history: int = 32) -> Deadlines:
    deadlines = Deadlines(600.0, history)
    for value in seconds:
        deadlines.observe(kind, value)
    return deadlines


def test_the_first_limit_is_the_users_until_three_waits_are_measured() -> None:
    assert make_deadlines().limit("reduce") == 600.0
    assert make_deadlines(1.0, 1.0).limit("reduce") == 600.0
    assert make_deadlines(1.0, 1.0, 1.0).limit("reduce") < 600.0


def test_a_call_has_a_first_limit_of_its_own_unless_the_users_is_shorter() -> None:
    assert Deadlines(600.0).limit("call") == MAX_FIRST_SECONDS["call"]
    assert Deadlines(2.0).limit("call") == 2.0


@pytest.mark.parametrize("kind,floor", [*FLOORS.items(), ("other", DEFAULT_FLOOR_SECONDS)])
def test_steady_waits_give_their_median_and_the_floor_of_their_kind(
    kind: str, floor: float
) -> None:
    assert make_deadlines(2.0, 2.0, 2.0, 2.5, kind=kind).limit(kind) == 2.0 + floor


def test_scattered_waits_give_their_median_and_a_multiple_of_their_deviation() -> None:
    # Median 30; distances from it 20, 10, 0, 10, 20: their median 10.
    assert make_deadlines(10.0, 20.0, 30.0, 40.0, 50.0).limit("reduce") == 30.0 + SPREAD * 10.0


def test_one_outlier_among_many_hardly_moves_the_limit() -> None:
    steady, outlier = make_deadlines(*[5.0] * 9), make_deadlines(*[5.0] * 8, 500.0)
    assert outlier.limit("reduce") == steady.limit("reduce")


def test_only_the_last_waits_count() -> None:
    deadlines = make_deadlines(100.0, 100.0, 100.0, 1.0, 1.0, 1.0, history=3)
    assert deadlines.typical("reduce") == 1.0
    assert deadlines.limit("reduce") == 1.0 + FLOORS["reduce"]


def test_kinds_of_wait_are_measured_apart() -> None:
    deadlines = make_deadlines(1.0, 1.0, 1.0)
    assert deadlines.limit("other") == 600.0
    assert deadlines.typical("other") is None


@pytest.mark.parametrize("value", [0.0, 1e-9, 3600.0])
def test_a_limit_is_never_below_what_was_measured(value: float) -> None:
    assert make_deadlines(value, value, value).limit("reduce") > value


def test_the_grace_is_the_users_until_rounds_are_measured() -> None:
    assert make_deadlines().grace(3) == 600.0
    assert make_deadlines(50.0, 50.0, kind="round").grace(3) == 600.0


def test_the_grace_is_a_round_shared_by_those_who_wait() -> None:
    deadlines = make_deadlines(60.0, 60.0, 60.0, kind="round")
    assert [deadlines.grace(n) for n in (0, 1, 2, 4)] == [60.0, 60.0, 30.0, 15.0]


def test_whoever_has_missed_rounds_is_waited_for_in_proportion_and_two_rounds_at_most() -> None:
    deadlines = make_deadlines(60.0, 60.0, 60.0, kind="round")
    assert [deadlines.grace(4, 1, missed) for missed in (1, 2, 4, 8, 16)] == [
        15.0,
        30.0,
        60.0,
        120.0,
        120.0,
    ]
    assert deadlines.grace(1, 5, 4) == 300.0, "five that are absent are waited for as long as ever"


def test_short_rounds_do_not_make_the_grace_shorter_than_its_floor() -> None:
    assert make_deadlines(0.5, 0.5, 0.5, kind="round").grace(4) == FLOORS["grace"]


def test_waits_are_recorded_while_another_thread_asks_for_the_limit() -> None:
    deadlines, is_over = Deadlines(600), threading.Event()

    def record() -> None:
        while not is_over.is_set():
            deadlines.observe("call", 1.0)

    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(record)
        try:
            for _ in range(3_000):
                deadlines.limit("call")
        finally:
            is_over.set()
        recording.result(60)
