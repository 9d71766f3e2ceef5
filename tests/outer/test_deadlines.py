"""Deadlines follow what was measured."""

import pytest

from outer.deadlines import FLOOR_SECONDS, SPREAD, Deadlines


def measured(*seconds: float, history: int = 32) -> Deadlines:
    deadlines = Deadlines(600.0, history)
    for value in seconds:
        deadlines.observe("reduce", value)
    return deadlines


def test_the_first_limit_is_the_users_until_three_waits_are_measured() -> None:
    assert measured().limit("reduce") == 600.0
    assert measured(1.0, 1.0).limit("reduce") == 600.0
    assert measured(1.0, 1.0, 1.0).limit("reduce") < 600.0


def test_steady_waits_give_their_median_and_the_floor() -> None:
    assert measured(2.0, 2.0, 2.0, 2.5).limit("reduce") == 2.0 + FLOOR_SECONDS


def test_scattered_waits_give_their_median_and_a_multiple_of_their_deviation() -> None:
    # Median 30; distances from it 20, 10, 0, 10, 20: their median 10.
    assert measured(10.0, 20.0, 30.0, 40.0, 50.0).limit("reduce") == 30.0 + SPREAD * 10.0


def test_one_outlier_among_many_hardly_moves_the_limit() -> None:
    steady, outlier = measured(*[5.0] * 9), measured(*[5.0] * 8, 500.0)
    assert outlier.limit("reduce") == steady.limit("reduce")


def test_only_the_last_waits_count() -> None:
    assert measured(100.0, 100.0, 100.0, 1.0, 1.0, 1.0, history=3).limit("reduce") == 1.0 + FLOOR_SECONDS


def test_kinds_of_wait_are_measured_apart() -> None:
    assert measured(1.0, 1.0, 1.0).limit("ready") == 600.0


@pytest.mark.parametrize("value", [0.0, 1e-9, 3600.0])
def test_a_limit_is_never_below_what_was_measured(value: float) -> None:
    assert measured(value, value, value).limit("reduce") > value
