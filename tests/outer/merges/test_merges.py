"""The guarantees of each merge rule, and the effect of a poisoned participant."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outer.config import MergeConfig
from outer.merges import build_merge
from outer.merges.base import Merge, weights_of
from outer.merges.contributors import contributors
from outer.merges.geometric_median import geometric_median
from outer.merges.mean import weighted_mean
from outer.merges.radial import radial
from outer.merges.sort_rows import CHUNK, comparators, coordinate_median
from outer.merges.trimmed_mean import num_trimmed, trimmed_mean

torch.set_num_threads(1)

ROBUST = ["trimmed_mean", "geometric_median", "centered_clip"]
RULES = ["mean", *ROBUST, "radial", "contributors"]
HUGE = 3.0e38


def rule_of(name: str, trim: float = 0.125) -> Merge:
    return build_merge(MergeConfig(rule=name, trim=trim))  # type: ignore[arg-type]


def parts_of(num_parts: int, size: int = 1000, seed: int = 0) -> list[torch.Tensor]:
    """Pseudo-gradients of honest islands: a common component, and a larger one of their own."""
    rng = np.random.default_rng([seed, num_parts])
    common = rng.standard_normal(size)
    parts = [0.5 * common + rng.standard_normal(size) for _ in range(num_parts)]
    return [torch.from_numpy(part.astype(np.float32)) for part in parts]


def equal_weights(parts: Sequence[torch.Tensor]) -> list[float]:
    return weights_of([1] * len(parts))


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether the difference is at most `tolerance` times the norm of `expected`."""
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("has_last", [False, True])
def test_identical_parts_are_the_result(name: str, has_last: bool) -> None:
    (part, last) = parts_of(2)
    result = rule_of(name)([part] * 5, weights_of([3, 1, 4, 1, 5]), last if has_last else None)
    assert near(result, part, 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_one_participants_part_is_the_result(name: str) -> None:
    (part,) = parts_of(1)
    assert torch.equal(rule_of(name)([part], [1.0], None), part)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 9])
def test_parts_of_zeros_give_zeros(name: str, num_parts: int) -> None:
    parts = [torch.zeros(100)] * num_parts
    assert torch.equal(
        rule_of(name)(parts, equal_weights(parts), torch.zeros(100)), torch.zeros(100)
    )


@pytest.mark.parametrize("name", RULES)
def test_an_empty_part_stays_empty(name: str) -> None:
    assert rule_of(name)([torch.empty(0)] * 4, [0.25] * 4, None).shape == (0,)


@pytest.mark.parametrize("name", RULES)
def test_without_tokens_all_count_the_same(name: str) -> None:
    parts = parts_of(6)
    nobody, everybody = weights_of([0] * 6), weights_of([7] * 6)
    assert near(rule_of(name)(parts, nobody, None), rule_of(name)(parts, everybody, None), 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_who_weighs_nothing_has_no_say(name: str) -> None:
    parts = parts_of(6)
    bad = torch.full_like(parts[0], HUGE)
    with_them = [bad, *parts[:3], bad, *parts[3:], bad]
    result = rule_of(name)(with_them, weights_of([0, 1, 2, 3, 0, 4, 5, 6, 0]), None)
    assert torch.equal(result, rule_of(name)(parts, weights_of([1, 2, 3, 4, 5, 6]), None))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("has_last", [False, True])
def test_the_order_of_participants_does_not_matter(name: str, has_last: bool) -> None:
    parts, weights, last = (
        parts_of(7),
        weights_of([1, 2, 3, 4, 5, 6, 7]),
        parts_of(1)[0] if has_last else None,
    )
    order = [4, 2, 6, 0, 5, 1, 3]
    turned = rule_of(name)([parts[i] for i in order], [weights[i] for i in order], last)
    assert near(turned, rule_of(name)(parts, weights, last), 1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("factor", [-1.0, 2.0**-40, 2.0**40])
def test_scaled_parts_give_the_scaled_result(name: str, factor: float) -> None:
    parts, weights, last = parts_of(8), weights_of([1, 2, 3, 4, 5, 6, 7, 8]), parts_of(1)[0]
    scaled = rule_of(name)([part * factor for part in parts], weights, last * factor)
    assert near(scaled, rule_of(name)(parts, weights, last) * factor, 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_equal_calls_give_equal_bits_and_leave_the_parts_alone(name: str) -> None:
    parts, weights, last = (
        parts_of(8, 3 * CHUNK + 7),
        weights_of([8, 7, 6, 5, 4, 3, 2, 1]),
        parts_of(1, 3 * CHUNK + 7)[0],
    )
    before = [part.clone() for part in [*parts, last]]
    results = [rule_of(name)(iter(parts), weights, last) for _ in range(2)]
    assert torch.equal(*results)
    assert all(torch.equal(a, b) for a, b in zip([*parts, last], before, strict=True))


@pytest.mark.parametrize("name", [*ROBUST, "radial"])
def test_without_an_attacker_the_result_is_near_the_mean(name: str) -> None:
    # Nothing in common: the mean is what is left of noise, and a robust rule keeps most of it.
    parts = parts_of(8, 4096)
    expected = weighted_mean(parts, equal_weights(parts))
    result = rule_of(name)(parts, equal_weights(parts), None)
    assert float(torch.cosine_similarity(result, expected, dim=0)) > 0.95


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("factor", [-10.0, 1e30])
@pytest.mark.parametrize("has_last", [False, True])
def test_one_of_eight_cannot_carry_the_result_away(
    name: str, factor: float, has_last: bool
) -> None:
    parts, last = parts_of(8, 4096), parts_of(1, 4096)[0] if has_last else None
    honest = weighted_mean(parts[:7], equal_weights(parts[:7]))
    result = rule_of(name)([*parts[:3], parts[7] * factor, *parts[3:7]], equal_weights(parts), last)
    # Half of what an honest participant is away from the honest mean.
    assert float((result - honest).norm()) < 0.5 * float((parts[0] - honest).norm())


def test_one_of_eight_does_carry_the_mean_away() -> None:
    parts = parts_of(8, 4096)
    honest = weighted_mean(parts[:7], equal_weights(parts[:7]))
    result = weighted_mean([*parts[:7], parts[7] * -10], equal_weights(parts))
    assert float((result - honest).norm()) > float((parts[0] - honest).norm())


@pytest.mark.parametrize("name", ROBUST)
def test_a_majority_that_has_nothing_to_say_is_not_overruled(name: str) -> None:
    # A parameter that only one island's data reaches, or one island's lie: five of seven send
    # zeros.
    parts = [torch.zeros(100)] * 5 + [torch.full((100,), HUGE), torch.full((100,), -1.0)]
    assert torch.equal(rule_of(name, trim=0.3)(parts, equal_weights(parts), None), torch.zeros(100))


@pytest.mark.parametrize("name", RULES)
def test_huge_values_of_all_stay_finite(name: str) -> None:
    parts = [part.sign() * 1e38 for part in parts_of(8)]
    assert bool(rule_of(name)(parts, equal_weights(parts), None).isfinite().all())


# -- trimmed mean ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trim", "num_participants", "expected"),
    [
        (0.125, 1, 0),
        (0.125, 2, 0),
        (0.125, 3, 1),
        (0.125, 8, 1),
        (0.125, 9, 2),
        (0.4, 3, 1),
        (0.49, 8, 3),
        (0.07, 100, 7),
    ],
)
def test_how_many_are_trimmed(trim: float, num_participants: int, expected: int) -> None:
    assert num_trimmed(trim, num_participants) == expected


@given(st.integers(3, 12), st.integers(0, 1000), st.sampled_from([0.1, 0.25, 0.45]), st.data())
def test_the_trimmed_mean_lies_between_honest_values_in_every_coordinate(
    num_parts: int, seed: int, trim: float, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    num_bad = data.draw(st.integers(0, num_trimmed(trim, num_parts)))
    # Few different values, so that ties are common.
    parts = [torch.from_numpy(rng.integers(-3, 4, 40).astype(np.float32)) for _ in range(num_parts)]
    honest = torch.stack(parts[num_bad:])
    for bad in parts[:num_bad]:
        bad *= float(10.0 ** rng.integers(0, 38))
    weights = weights_of(rng.integers(1, 1000, num_parts).tolist())
    order = rng.permutation(num_parts)
    result = trimmed_mean([parts[i] for i in order], [weights[i] for i in order], None, trim=trim)
    assert bool((result >= honest.amin(0)).all() and (result <= honest.amax(0)).all())


def test_the_trimmed_mean_is_the_weighted_mean_of_those_between() -> None:
    parts, weights = parts_of(9, CHUNK + 100), weights_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    values = np.stack([part.numpy() for part in parts]).astype(np.float64)
    kept = np.argsort(values, axis=0)[2:-2]
    shares = np.broadcast_to(np.array(weights)[:, None], values.shape)
    kept_values, kept_shares = (
        np.take_along_axis(values, kept, 0),
        np.take_along_axis(shares, kept, 0),
    )
    expected = (kept_values * kept_shares).sum(0) / kept_shares.sum(0)
    result = trimmed_mean(parts, weights, None, trim=0.2)
    assert np.allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_of_two_the_trimmed_mean_and_the_geometric_median_are_the_mean() -> None:
    parts, weights = parts_of(2), weights_of([1, 3])
    for name in ("trimmed_mean", "geometric_median"):
        assert torch.equal(rule_of(name)(parts, weights, None), weighted_mean(parts, weights))


# -- sorting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", range(1, 11))
def test_the_comparators_sort(num_rows: int) -> None:
    # What sorts all zeros and ones sorts everything (Knuth, 5.3.4, theorem Z).
    for bits in product([0, 1], repeat=num_rows):
        row = list(bits)
        for low, high in comparators(num_rows):
            row[low], row[high] = min(row[low], row[high]), max(row[low], row[high])
        assert row == sorted(bits)


@pytest.mark.parametrize("num_parts", [1, 2, 5, 8, 33])
def test_the_coordinate_median_is_numpys(num_parts: int) -> None:
    parts = parts_of(num_parts, CHUNK + 100)
    expected = np.median(np.stack([part.numpy() for part in parts]), axis=0)
    assert np.allclose(coordinate_median(parts).numpy(), expected, rtol=1e-6, atol=1e-7)


# -- geometric median ------------------------------------------------------------------------------


def spread(parts: Sequence[torch.Tensor], weights: Sequence[float], at: torch.Tensor) -> float:
    """The objective that the geometric median minimises."""
    return sum(
        weight * float((part.double() - at.double()).norm())
        for part, weight in zip(parts, weights, strict=True)
    )


@pytest.mark.parametrize("seed", range(5))
def test_no_point_nearby_has_a_smaller_sum_of_distances_than_the_geometric_median(
    seed: int,
) -> None:
    # In few dimensions, where the median is far from the mean.
    parts, weights = parts_of(7, 3, seed), weights_of([1, 2, 3, 1, 2, 3, 1])
    found = geometric_median(parts, weights, None)
    least = spread(parts, weights, found)
    generator = torch.Generator().manual_seed(seed)
    for scale in (1e-1, 1e-2, 1e-3):
        for _ in range(50):
            other = found + scale * torch.randn(3, generator=generator)
            assert least <= spread(parts, weights, other) * (1 + 1e-6)


def test_an_island_with_more_than_half_of_the_tokens_is_the_geometric_median() -> None:
    parts = parts_of(5)
    assert near(geometric_median(parts, weights_of([1, 1, 10, 1, 1]), None), parts[2], 1e-4)


# -- centered clip ---------------------------------------------------------------------------------


def test_centered_clipping_starts_at_the_last_mean() -> None:
    # Three say one thing, two another: around the last mean of the three, the two are clipped away.
    left, right = torch.full((10,), 1.0), torch.full((10,), -1.0)
    parts = [left, left, left, right, right]
    results = [
        rule_of("centered_clip")(parts, equal_weights(parts), last) for last in (left, right)
    ]
    assert near(results[0], left, 1e-6)
    assert not near(results[1], left, 0.1)


# -- radial ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [2, 8, 16])
def test_the_radial_mean_of_orthonormal_parts_has_norm_one(num_parts: int) -> None:
    parts = list(torch.eye(num_parts, 64))
    weights = equal_weights(parts)
    assert float(weighted_mean(parts, weights).norm()) == pytest.approx(num_parts**-0.5)
    assert float(radial(parts, weights, None).norm()) == pytest.approx(1.0, rel=1e-6)


def test_the_radial_mean_is_the_papers_equation() -> None:
    parts, weights = parts_of(5), weights_of([5, 4, 3, 2, 1])
    parts[2] *= 30
    exact = [part.double() for part in parts]
    length = sum(w * x.norm() for x, w in zip(exact, weights, strict=True))
    direction = sum(w * x / x.norm() for x, w in zip(exact, weights, strict=True))
    assert near(radial(parts, weights, None), length * direction / direction.norm(), 1e-5)  # type: ignore[union-attr]


def test_a_part_of_zeros_has_no_direction_but_counts_as_a_length() -> None:
    (part,) = parts_of(1)
    parts = [part, torch.zeros_like(part), torch.zeros_like(part), torch.zeros_like(part)]
    assert near(radial(parts, equal_weights(parts), None), part * 0.25, 1e-6)


def test_directions_that_cancel_give_the_mean() -> None:
    (part,) = parts_of(1)
    parts = [part, -3.0 * part]
    assert torch.equal(radial(parts, [0.5, 0.5], None), weighted_mean(parts, [0.5, 0.5]))


# -- contributors ----------------------------------------------------------------------------------


def test_contributors_divides_each_element_by_the_weights_of_those_who_sent_it() -> None:
    parts = [torch.tensor([2.0, 0.0, 4.0, 0.0]), torch.tensor([4.0, 8.0, 0.0, 0.0])]
    weights = [0.25, 0.75]
    assert contributors(parts, weights, None).tolist() == [3.5, 8.0, 4.0, 0.0]
    assert weighted_mean(parts, weights).tolist() == [3.5, 6.0, 1.0, 0.0]


def test_when_everybody_sends_everything_contributors_is_the_mean() -> None:
    parts = parts_of(4)
    weights = weights_of([1, 2, 3, 4])
    assert near(contributors(parts, weights, None), weighted_mean(parts, weights), 1e-6)
