"""The scaling laws against figures that their authors print, and against what defines a best
allocation.
"""

import pytest

from diloco.planning.laws.chinchilla import (
    Allocation,
    best_for_compute,
    cheapest_for_loss,
    overhead,
)
from diloco.planning.laws.islands import (
    CHECKED,
    best_batch,
    best_lr,
    diloco_loss,
    is_extrapolated,
    loss_gap,
)

COMPUTE = [1e18, 1e21, 5.76e23]


@pytest.mark.parametrize("flops", COMPUTE)
def test_no_other_size_of_the_same_compute_has_a_lower_loss(flops: float):
    best = best_for_compute(flops)
    assert best.flops == pytest.approx(flops)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert Allocation(factor * best.params, best.tokens / factor).loss > best.loss


@pytest.mark.parametrize("flops", COMPUTE)
def test_the_cheapest_way_to_the_best_loss_of_a_budget_is_that_budget(flops: float):
    best = best_for_compute(flops)
    again = cheapest_for_loss(best.loss)
    assert (again.params, again.tokens) == pytest.approx((best.params, best.tokens))
    assert overhead(best) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("share", "expected", "within"), [(0.5, 0.20, 0.01), (0.3, 1.0, 0.06), (0.25, 1.88, 0.01)]
)
def test_smaller_models_cost_what_de_vries_prints(share: float, expected: float, within: float):
    best = best_for_compute(1e22)
    low, high = best.tokens, 1000 * best.tokens
    while high > 1.0001 * low:  # Tokens at which the smaller model reaches the same loss.
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high)
            if Allocation(share * best.params, middle).loss > best.loss
            else (low, middle)
        )
    assert overhead(Allocation(share * best.params, high)) == pytest.approx(expected, abs=within)


def test_more_islands_change_the_joint_fits_as_the_paper_says():
    lr = [best_lr(1e9, islands) / best_lr(1e9, 1) for islands in (2, 4, 8)]
    batch = [best_batch(1e9, islands) / best_batch(1e9, 1) for islands in (2, 4, 8)]
    assert lr == pytest.approx([1.23, 1.50, 1.84], abs=0.005)
    assert batch == pytest.approx([1.27, 1.60, 2.03], abs=0.005)
    assert diloco_loss(1e9, 3) / diloco_loss(1e9, 5) == pytest.approx((3 / 5) ** 0.0116)


def test_the_gap_shrinks_with_the_size_and_grows_with_islands():
    gaps = {
        islands: [100 * loss_gap(params, islands) for params in (35e6, 1e9, 4e9, 1e10)]
        for islands in (1, 2, 4, 8)
    }
    assert gaps[1] == pytest.approx([-0.1, -0.4, -0.5, -0.6], abs=0.06)
    assert gaps[2] == pytest.approx([0.7, 0.15, -0.07, -0.2], abs=0.06)
    assert gaps[4] == pytest.approx([1.9, 0.5, 0.0, -0.35], abs=0.06)
    assert gaps[8] == pytest.approx([3.7, 1.5, 0.6, 0.0], abs=0.06)


def test_the_papers_largest_models_are_behind_the_fits_by_a_third_to_two_thirds_of_a_percent():
    for (parallel, islands), params in zip(CHECKED.values(), (4e9, 1e10), strict=True):
        assert 0.002 < islands / parallel - 1 - loss_gap(params, 4) < 0.007


def test_sizes_that_were_not_fitted_are_known_as_such():
    assert [is_extrapolated(params) for params in (1e6, 35e6, 2.4e9, 1e10)] == [
        True,
        False,
        False,
        True,
    ]


def test_the_fit_expects_of_chinchilla_less_loss_than_of_gopher_by_so_much():
    gopher, chinchilla = Allocation(280e9, 300e9), Allocation(70e9, 1.4e12)
    assert (gopher.loss, chinchilla.loss) == pytest.approx((1.993, 1.937), abs=0.0005)
