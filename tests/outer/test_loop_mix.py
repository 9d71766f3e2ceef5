"""Weights from tokens, and sums that are the same on every call."""

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outer.config import MergeConfig
from outer.errors import MessageError
from outer.merges import build_merge
from outer.merges.base import weights_of
from outer.merges.mean import WeightedSum, weighted_mean

torch.set_num_threads(1)


def parts_of(num_parts: int, size: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(num_parts)
    return [
        torch.from_numpy(rng.standard_normal(size).astype(np.float32)) for _ in range(num_parts)
    ]


def test_weights_are_shares_of_the_tokens() -> None:
    assert weights_of([300, 100]) == [0.75, 0.25]


def test_one_participant_weighs_exactly_one() -> None:
    assert weights_of([12345]) == [1.0]


def test_a_joiner_without_tokens_weighs_nothing() -> None:
    assert weights_of([300, 0]) == [1.0, 0.0]


def test_without_any_tokens_all_weigh_the_same() -> None:
    assert weights_of([0, 0, 0, 0]) == [0.25] * 4


def test_a_round_without_participants_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one participant"):
        weights_of([])


def test_a_negative_token_count_is_refused() -> None:
    with pytest.raises(MessageError, match="-1"):
        weights_of([5, -1])


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=64))
def test_weights_sum_to_one(tokens: list[int]) -> None:
    assert abs(sum(weights_of(tokens)) - 1.0) < 1e-14


@pytest.mark.parametrize("num_parts", [1, 2, 3, 16])
@pytest.mark.parametrize("size", [0, 1, 1000, 4099])
def test_the_mean_is_near_the_fp64_mean(num_parts: int, size: int) -> None:
    parts, weights = parts_of(num_parts, size), weights_of(list(range(1, num_parts + 1)))
    expected = sum(
        part.numpy().astype(np.float64) * w for part, w in zip(parts, weights, strict=True)
    )
    magnitude = sum(
        part.abs().numpy().astype(np.float64) * w for part, w in zip(parts, weights, strict=True)
    )
    error = np.abs(weighted_mean(parts, weights).numpy() - expected)
    assert (error <= (num_parts + 2) * 2.0**-24 * magnitude).all()


def test_the_mean_is_the_unfused_sum_in_order_bit_for_bit() -> None:
    parts, weights = parts_of(5, 4099), weights_of([3, 1, 4, 1, 5])
    expected = np.zeros(4099, dtype=np.float32)
    for part, weight in zip(parts, weights, strict=True):
        expected = expected + np.float32(weight) * part.numpy()
    assert np.array_equal(weighted_mean(parts, weights).numpy(), expected)


def test_the_mean_holds_one_part_at_a_time() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def decoded() -> Iterator[torch.Tensor]:
        for part in parts_of(6, 100):
            # The one added last may be waited for by the loop over them, no other.
            assert sum(ref() is not None for ref in held) <= 1
            copy = part.clone()
            held.append(weakref.ref(copy))
            yield copy
            del copy

    weighted_mean(decoded(), [1 / 6] * 6)
    assert len(held) == 6


def test_the_rule_called_mean_is_the_weighted_mean_bit_for_bit() -> None:
    parts, weights = parts_of(5, 4099), weights_of([3, 1, 4, 1, 5])
    result = build_merge(MergeConfig())(iter(parts), weights, parts[0])
    assert torch.equal(result, weighted_mean(parts, weights))


def test_equal_calls_give_equal_bits() -> None:
    parts, weights = parts_of(7, 4099), weights_of([7, 6, 5, 4, 3, 2, 1])
    assert torch.equal(weighted_mean(parts, weights), weighted_mean(parts, weights))


def test_a_slice_sums_as_it_does_within_the_whole() -> None:
    parts, weights = parts_of(3, 1000), weights_of([1, 2, 4])
    whole = weighted_mean(parts, weights)
    for start in range(1, 40):
        assert torch.equal(weighted_mean([part[start:] for part in parts], weights), whole[start:])


def test_one_part_of_weight_one_is_itself() -> None:
    (part,) = parts_of(1, 1000)
    assert torch.equal(weighted_mean([part], [1.0]), part)


def test_adding_leaves_the_part_alone() -> None:
    (part,) = parts_of(1, 100)
    before = part.clone()
    total = WeightedSum(100)
    total.add(part, 0.5)
    total.add(part, 0.5)
    assert torch.equal(part, before) and torch.equal(total.result(), part)


def test_a_part_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(1,\) into a sum of \(100,\)"):
        WeightedSum(100).add(torch.ones(1), 1.0)


def test_as_many_weights_as_parts_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        weighted_mean(parts_of(2, 10), [1.0])
