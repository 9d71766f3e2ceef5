"""Statistics of an experiment."""

import pytest

from diloco.experiments.results.comparison import (
    central_probability,
    compare,
    estimate,
    spread,
    student_t,
)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)],
)
def test_students_t_is_that_of_the_tables(degrees, expected):
    assert student_t(0.95, degrees) == pytest.approx(expected, abs=5e-5)
    assert central_probability(expected, degrees) == pytest.approx(0.95, abs=1e-5)


def test_the_interval_of_a_mean_is_students():
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.num_seeds) == (2.0, 3)
    assert found.half_width == pytest.approx(4.3027 / 3**0.5, abs=1e-4)
    assert not found.is_significant or found.mean > found.half_width


def test_a_difference_is_taken_between_runs_of_one_seed():
    losses, baseline = {0: 2.02, 1: 3.03, 2: 9.0}, {0: 2.0, 1: 3.0, 5: 1.0}
    found = compare(losses, baseline)
    assert found is not None
    assert found.mean == pytest.approx(0.01)
    assert found.half_width == pytest.approx(0.0, abs=1e-9)
    assert found.num_seeds == 2


def test_one_seed_has_no_interval_and_no_pair_no_difference():
    only = compare({0: 2.1}, {0: 2.0})
    assert only is not None and only.half_width is None
    assert compare({0: 2.1}, {1: 2.0}) is None
    assert spread([1.0]) is None
