"""The gradient noise scale on a quadratic whose noise is known."""

import pytest
import torch

from inner.data.micro_batch import Ahead, MicroBatch
from inner.optim.noise_scale import (
    ONE_IN,
    GradientNoise,
    estimate_noise,
    is_in_small_batch,
    without_targets,
)

DIM, SMALL, LARGE, STEPS = 50, 8, 64, 4000
SIGMA = 0.5


def estimates() -> tuple[float, float, float]:
    """|G|^2 of the loss |w|^2 / 2 at a w, and mean estimates of it and of S, with noise of SIGMA in
    each of DIM.
    """
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(DIM, generator=generator, dtype=torch.float64)
    found = []
    for _ in range(STEPS):
        gradients = w + SIGMA * torch.randn(LARGE, DIM, generator=generator, dtype=torch.float64)
        squares = [float(gradients[:count].mean(0).square().sum()) for count in (SMALL, LARGE)]
        found.append(estimate_noise((SMALL, squares[0]), (LARGE, squares[1])))
    signal, noise = (
        sum(getattr(each, what) for each in found) / STEPS for what in ("signal", "noise")
    )
    return float(w.square().sum()), signal, noise


def test_signal_and_noise_of_a_quadratic_are_found():
    truth, signal, noise = estimates()
    assert signal == pytest.approx(truth, rel=0.005)
    assert noise == pytest.approx(DIM * SIGMA**2, rel=0.02)
    assert GradientNoise(signal, noise).figures["tokens"] == pytest.approx(
        DIM * SIGMA**2 / truth, rel=0.02
    )


def test_a_scale_needs_both_to_be_positive():
    for estimates in ((-1.0, 2.0), (1.0, -2.0)):
        assert GradientNoise(*estimates).figures == dict(
            zip(("signal", "noise"), estimates, strict=True)
        )


def test_every_split_of_a_step_has_the_same_small_batch():
    whole = is_in_small_batch(0, 12)
    assert sum(whole) == 12 // ONE_IN
    assert [kept for first in range(0, 12, 3) for kept in is_in_small_batch(first, 3)] == whole
    assert any(is_in_small_batch(0, 2)) and not all(is_in_small_batch(0, 2))


def test_only_the_targets_of_other_sequences_are_left_out():
    batch = MicroBatch(torch.arange(6).view(3, 2), torch.arange(6).view(3, 2), None)
    got = without_targets(batch, [False, True, False])
    assert got.targets_BS.tolist() == [[-100, -100], [2, 3], [-100, -100]]
    assert got.tokens_BS.equal(batch.tokens_BS) and batch.targets_BS.equal(batch.tokens_BS)


def test_targets_of_extra_depths_are_left_out_with_the_others():
    numbers = torch.arange(6).view(3, 2)
    batch = MicroBatch(numbers, numbers, None, Ahead(numbers[None], numbers[None]))
    got = without_targets(batch, [False, True, False]).ahead
    assert got is not None
    assert got.targets_PBS.tolist() == [[[-100, -100], [2, 3], [-100, -100]]]
    assert got.tokens_PBS.equal(numbers[None])
