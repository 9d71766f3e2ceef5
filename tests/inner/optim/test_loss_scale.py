"""The sequence of loss scales that a pattern of overflows gives."""

import pytest

from inner.errors import TrainingStopped
from inner.optim.loss_scale import GOOD_STEPS, MAX_EXPONENT, LossScale

G = [False] * GOOD_STEPS


def exponents(pattern: list[bool], first: int) -> list[int]:
    """The exponent after each change of it or overflow."""
    scale = LossScale(first)
    found = []
    for overflows in pattern:
        before = scale.exponent
        scale.observe(overflows=overflows)
        if overflows or scale.exponent != before:
            found.append(scale.exponent)
    return found


@pytest.mark.parametrize(
    ("pattern", "first", "expected"),
    [
        pytest.param([True], 16, [16], id="one overflow is tolerated"),
        pytest.param([True, True, True], 16, [16, 15, 14], id="each further one in a row halves"),
        pytest.param([True, False, True, True], 16, [16, 16, 15], id="a good step ends the row"),
        pytest.param(G[1:], 16, [], id="too few good steps"),
        pytest.param(G, 16, [17], id="enough good steps double"),
        pytest.param([*G, *G[1:]], 16, [17], id="good steps are counted anew after doubling"),
        pytest.param([*G, *G], 16, [17, 18], id="doubled again"),
        pytest.param([*G[1:], True, *G[1:]], 16, [16], id="a tolerated overflow counts anew"),
        pytest.param([*G[1:], True, *G], 16, [16, 17], id="good steps after an overflow"),
        pytest.param([*G, *G], MAX_EXPONENT - 1, [MAX_EXPONENT], id="the largest"),
        pytest.param([True, True, True], 2, [2, 1, 0], id="the smallest"),
        pytest.param(
            [True, False, True], 0, [0, 0], id="one overflow is tolerated at the smallest"
        ),
    ],
)
def test_a_pattern_of_overflows_gives_these_scales(
    pattern: list[bool], first: int, expected: list[int]
) -> None:
    assert exponents(pattern, first) == expected


def test_a_second_overflow_in_a_row_at_the_smallest_scale_stops_the_training() -> None:
    with pytest.raises(
        TrainingStopped, match=r"2 steps in a row.*loss scale of 1.*bfloat16 or float32"
    ):
        exponents([True, True], 0)


@pytest.mark.parametrize(
    ("others", "expected"), [(14, (14, 0)), (16, (16, 7)), (18, (16, 7)), (None, (16, 7))]
)
def test_the_smaller_scale_of_other_islands_is_taken(
    others: int | None, expected: tuple[int, int]
) -> None:
    scale = LossScale(16, num_good=7)
    scale.lower(others)
    assert (scale.exponent, scale.num_good) == expected
