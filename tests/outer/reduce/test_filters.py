"""Which participants the filters leave out."""

import pytest
import torch

from outer.config import MergeConfig
from outer.reduce.filters import find_outliers

torch.set_num_threads(1)

LAST = torch.tensor([1.0, 0.0, 0.0])
NORMS = MergeConfig(max_norm_ratio=3.0)
COSINES = MergeConfig(min_cosine=0.0)


def along(*lengths: float) -> list[torch.Tensor]:
    return [LAST * length for length in lengths]


def equal(num_parts: int) -> list[float]:
    return [1 / num_parts] * num_parts


def test_without_filters_all_are_let_in() -> None:
    assert find_outliers(along(1, -1e38, 0), equal(3), LAST, MergeConfig()) == [False] * 3


def test_a_part_far_longer_than_the_median_is_left_out() -> None:
    assert find_outliers(along(1, 1, -10, 2.9), equal(4), None, NORMS) == [
        False,
        False,
        True,
        False,
    ]


def test_short_parts_pass_the_norm_filter() -> None:
    assert find_outliers(along(1, 1, 1, 1e-30, 0), equal(5), None, NORMS) == [False] * 5


def test_of_two_neither_is_left_out_for_its_norm() -> None:
    assert find_outliers(along(1, 1e30), equal(2), None, NORMS) == [False] * 2


def test_where_most_send_zeros_nobody_is_too_long() -> None:
    assert find_outliers(along(0, 0, 5), equal(3), None, NORMS) == [False] * 3


def test_squares_that_overflow_fp32_are_compared_too() -> None:
    assert find_outliers(along(1e30, 1e30, 1e34), equal(3), None, NORMS) == [False, False, True]


def test_a_part_turned_away_from_the_last_mean_is_left_out() -> None:
    parts = [*along(1, 0.1, -10), torch.tensor([-0.1, 1.0, 0.0])]
    assert find_outliers(parts, equal(4), LAST, COSINES) == [False, False, True, True]


@pytest.mark.parametrize(("min_cosine", "expected"), [(0.65, True), (0.55, False)])
def test_the_cosine_is_what_is_compared(min_cosine: float, expected: bool) -> None:
    parts = [*along(1), torch.tensor([30.0, 40.0, 0.0])]
    config = MergeConfig(min_cosine=min_cosine)
    assert find_outliers(parts, equal(2), LAST * 1e-3, config) == [False, expected]


def test_without_a_last_mean_no_direction_is_wrong() -> None:
    assert find_outliers(along(1, -1), equal(2), None, COSINES) == [False] * 2


def test_zeros_have_no_direction() -> None:
    assert find_outliers(along(1, 0), equal(2), LAST, MergeConfig(min_cosine=0.9)) == [False] * 2
    assert (
        find_outliers(along(1, -1), equal(2), LAST * 0, MergeConfig(min_cosine=0.9)) == [False] * 2
    )


def test_either_filter_is_enough() -> None:
    both = MergeConfig(max_norm_ratio=3.0, min_cosine=0.0)
    assert find_outliers(along(1, 1, -1, 10), equal(4), LAST, both) == [False, False, True, True]


def test_when_all_would_be_left_out_none_is() -> None:
    assert find_outliers(along(-1, -2), equal(2), LAST, COSINES) == [False] * 2


def test_who_weighs_nothing_is_neither_asked_nor_left_out() -> None:
    # Three joiners' zeros would make the median zero, and one of them would stand for all others.
    parts, weights = along(0, 0, 0, 1, 1, 10, -1), [0, 0, 0, 0.25, 0.25, 0.25, 0.25]
    assert find_outliers(parts, weights, None, NORMS) == [False] * 5 + [True, False]
    assert find_outliers(along(1, -1), [0.0, 1.0], LAST, COSINES) == [False] * 2
