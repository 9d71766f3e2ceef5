"""Which island reduces which part."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outer.reduce.assignment import SLOTS_PER_ISLAND, reduce_shares, take_turns

RATES = st.lists(st.integers(1, 10**6), min_size=3, max_size=12)


def seconds(shares: list[Fraction], rates: list[int]) -> Fraction:
    """Time until all have sent everything, for a model of one unit."""
    return max(
        (1 + share * (len(rates) - 2)) / rate for share, rate in zip(shares, rates, strict=True)
    )


@given(rates=RATES)
@settings(deadline=None)
def test_no_other_shares_would_be_faster(rates: list[int]) -> None:
    shares = reduce_shares(rates)
    assert sum(shares) == 1 and min(shares) >= 0
    # All links together carry 2 n - 2 models, and each carries one.
    assert seconds(shares, rates) == max(
        Fraction(2 * len(rates) - 2, sum(rates)), Fraction(1, min(rates))
    )


@pytest.mark.parametrize("rates", [[5], [7, 3], [9, 9, 9, 9], [100, 0, 100], [0, 0, 0]])
def test_shares_are_equal_if_rates_are_or_are_not_known(rates: list[int]) -> None:
    shares = reduce_shares(rates)
    assert shares == [Fraction(1, len(rates))] * len(rates)
    turn = take_turns(shares, SLOTS_PER_ISLAND * len(rates))
    assert turn == list(range(len(rates))) * SLOTS_PER_ISLAND


def test_fast_islands_reduce_no_more_than_the_round_needs() -> None:
    """The link of 20 needs 1/20 in any case; by then the links of 100 can reduce as much as that of
    1000.
    """
    sixth = Fraction(1, 6)
    assert reduce_shares([1000, 100, 100, 20, 100, 100, 100]) == [
        sixth,
        sixth,
        sixth,
        0,
        sixth,
        sixth,
        sixth,
    ]


@given(rates=RATES)
@settings(deadline=None)
def test_turns_hold_the_shares_and_spread_them(rates: list[int]) -> None:
    shares, num_slots = reduce_shares(rates), SLOTS_PER_ISLAND * len(rates)
    turn = take_turns(shares, num_slots)
    assert len(turn) == num_slots
    for index, share in enumerate(shares):
        assert abs(turn.count(index) - share * num_slots) < 1
        half = turn[: num_slots // 2].count(index)
        assert abs(half - turn.count(index) / 2) <= 1
