"""In float16 losses are scaled, and a scaled gradient that is too large skips its step on all
ranks.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from inner.config import BalanceConfig
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes
from inner.trainer import StepResult, Trainer
from tests.harness import run_ranks
from tests.inner.small import (
    OPTIMIZER,
    SIZES,
    batch,
    build_trainer,
    relative_error,
    share,
    snapshot,
)
from tests.parity.meshes import PREDICT_MIXTURE, whole_gradients

TOO_LARGE = 30
BALANCE = BalanceConfig(bias_speed=0.01, sequence_loss=0.5, router_z_loss=0.1)
MESHES = [Degrees(dp_shard=2), pytest.param(Degrees(pp=2, tp=2), marks=pytest.mark.slow)]
on_meshes = pytest.mark.parametrize("degrees", MESHES, ids=str)


@dataclass
class Life:
    """What one rank saw."""

    in_float32: StepResult
    """The first step of a trainer in fp32."""
    good: StepResult
    """The first step in float16."""
    overflows: list[StepResult]
    """Further ones, with a scale that is too large."""
    is_unchanged: bool
    """Whether the overflows left the weights."""
    since_overflows: int | None
    broken: StepResult
    """A step of which the loss is not finite."""
    since_broken: int | None
    last_exponent: int


@cache
def life(degrees: Degrees) -> list[Life]:
    return run_ranks(live, degrees.num_ranks, degrees)


def live(_: int, degrees: Degrees) -> Life:
    in_float32 = step(build_trainer(degrees))
    trainer = build_trainer(degrees, compute_dtype="float16")
    assert trainer.loss_scale is not None
    trainer.loss_scale.exponent = 8
    good = step(trainer)
    trainer.loss_scale.exponent = TOO_LARGE
    before = snapshot(trainer.params)
    overflows = [step(trainer) for _ in range(3)]
    is_unchanged = all(map(torch.equal, before, snapshot(trainer.params)))
    since_overflows = trainer.broken_since
    trainer.params.write(0, torch.full(trainer.params.slices[0].shape, torch.nan))
    broken = step(trainer)
    exponent = trainer.loss_scale.exponent
    return Life(
        in_float32,
        good,
        overflows,
        is_unchanged,
        since_overflows,
        broken,
        trainer.broken_since,
        exponent,
    )


def step(trainer: Trainer) -> StepResult:
    return trainer.step(share(trainer, batch(trainer.inner_step)))


@on_meshes
def test_the_norm_is_that_of_unscaled_gradients(degrees: Degrees) -> None:
    seen = life(degrees)[0]
    assert seen.good.loss == pytest.approx(seen.in_float32.loss, rel=1e-3)
    assert seen.good.grad_norm == pytest.approx(seen.in_float32.grad_norm, rel=5e-3)


@on_meshes
def test_overflows_are_skipped_on_all_ranks_and_are_no_broken_steps(degrees: Degrees) -> None:
    for seen in life(degrees):
        assert all(
            result.overflows and result.is_skipped and result.loss for result in seen.overflows
        )
        assert [result.grad_norm for result in seen.overflows] == [None] * 3
        scales = [result.loss_scale for result in seen.overflows]
        assert scales == [2.0**TOO_LARGE, 2.0**TOO_LARGE, 2.0 ** (TOO_LARGE - 1)]
        assert seen.is_unchanged
        assert seen.since_overflows is None


@on_meshes
def test_a_step_without_a_finite_loss_is_broken_and_leaves_the_scale(degrees: Degrees) -> None:
    for seen in life(degrees):
        assert seen.broken.is_skipped
        assert not seen.broken.overflows
        assert seen.broken.loss is None
        assert seen.since_broken == 4
        assert seen.last_exponent == TOO_LARGE - 2


def gradients_by_dtype(_: int, sizes: ModelSizes) -> list[dict[str, Any]]:
    config = OPTIMIZER.model_copy(update={"balance": BALANCE, "z_loss": 0.1, "clip_norm": None})
    found = []
    for dtype in ("float32", "float16"):
        trainer = build_trainer(Degrees(), sizes, config, compute_dtype=dtype)
        if trainer.loss_scale is not None:
            trainer.loss_scale.exponent = 8
        gradients: dict[str, Any] = {}
        hook = trainer.optimizers[0].register_step_pre_hook(
            lambda *_, into=gradients, of=trainer: into.update(whole_gradients(of))
        )
        step(trainer)
        hook.remove()
        found.append(gradients)
    return found


def test_injected_losses_carry_the_scale() -> None:
    """With losses of experts, of an extra depth and of the softmax's denominator, gradients are
    those of fp32.
    """
    sizes = replace(PREDICT_MIXTURE, vocab_size=SIZES.vocab_size)
    exact, scaled = run_ranks(gradients_by_dtype, 1, sizes)[0]
    assert {
        name: relative_error(scaled[name], exact[name]) < 0.05 for name in exact
    } == dict.fromkeys(exact, True)
