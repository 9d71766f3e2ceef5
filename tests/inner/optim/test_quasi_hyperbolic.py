"""Quasi-hyperbolic AdamW equals its equations in fp64, AdamW at a weight of 1, and itself on other
meshes.
"""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from inner.config import OptimizerConfig
from inner.mesh import Degrees
from inner.optim.build import build_optimizers
from inner.optim.moments import KINDS, ParamsAndMoments
from inner.optim.quasi_hyperbolic import QuasiHyperbolicAdamW
from tests.harness import run_ranks
from tests.inner.small import (
    OPTIMIZER,
    batch,
    build_model,
    build_trainer,
    relative_error,
    share,
    whole_model,
)

SHAPE, STEPS, LR, DECAY, BETAS, EPS = (7, 5), 20, 0.02, 0.5, (0.99, 0.95), 1e-8


def gradient(step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def trained(weight: float) -> Tensor:
    """Ones after the steps."""
    param = nn.Parameter(torch.ones(SHAPE))
    groups = [{"params": [param], "weight_decay": DECAY}]
    optimizer = QuasiHyperbolicAdamW(groups, LR, BETAS, EPS, weight)
    for t in range(1, STEPS + 1):
        param.grad = gradient(t)
        optimizer.step()
    return param.detach()


def by_equations(weight: float) -> Tensor:
    """QHAdam's equations in fp64, its second weight being 1, with AdamW's decay."""
    value = torch.ones(SHAPE, dtype=torch.float64)
    m, v = torch.zeros(2, *SHAPE, dtype=torch.float64)
    for t in range(1, STEPS + 1):
        grad = gradient(t).double()
        m = BETAS[0] * m + (1 - BETAS[0]) * grad
        v = BETAS[1] * v + (1 - BETAS[1]) * grad**2
        ahead = (1 - weight) * grad + weight * m / (1 - BETAS[0] ** t)
        value = value - LR * DECAY * value - LR * ahead / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
    return value


@pytest.mark.parametrize("weight", [0.0, 0.7, 0.98])
def test_the_equations_hold(weight: float) -> None:
    assert relative_error(trained(weight), by_equations(weight)) < 1e-6
    assert relative_error(trained(weight), by_equations(1.0)) > 0.001


def config(weight: float) -> OptimizerConfig:
    return OptimizerConfig.model_validate(OPTIMIZER.model_dump() | {"momentum_weight": weight})


def test_a_weight_of_one_is_torchs_adamw() -> None:
    model = build_model()
    names = [name for name, _ in model.named_parameters()]
    plain, mixed = (build_optimizers([model], names, config(weight))[0] for weight in (1.0, 0.9))
    assert type(plain) is torch.optim.AdamW
    assert type(mixed) is QuasiHyperbolicAdamW


def test_it_is_for_adamw_alone() -> None:
    with pytest.raises(ValidationError, match="momentum_weight is for adamw, and name is muon"):
        OptimizerConfig.model_validate({"name": "muon", "momentum_weight": 0.9})


def models_on_a_rank(
    rank: int, meshes: list[Degrees]
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The whole model before the first and after the fifth step, on each mesh in turn."""
    found = []
    for degrees in meshes:
        trainer = build_trainer(degrees, config=config(0.9))
        moments = ParamsAndMoments(trainer.params, trainer.optimizers)
        assert len(moments.slices) == (1 + len(KINDS)) * len(trainer.params.slices)
        before = whole_model(trainer.params)[0]
        for step in range(5):
            trainer.step(share(trainer, batch(step)))
        found.append((before, whole_model(trainer.params)[0]))
    return found


def test_training_on_a_mesh_equals_one_process() -> None:
    ((first, expected),) = run_ranks(models_on_a_rank, 1, [Degrees()])[0]
    for _, got in run_ranks(models_on_a_rank, 2, [Degrees(dp_shard=2), Degrees(tp=2)])[0]:
        for param, value in expected.items():
            # AdamW amplifies rounding of gradients near zero.
            assert relative_error(got[param] - first[param], value - first[param]) < 2e-4, param
