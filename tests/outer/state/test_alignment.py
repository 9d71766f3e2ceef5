"""HeLoCo's rule: agreement changes no bit, what points against the momentum is taken away, the rest
is turned.
"""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from outer.config import AlignConfig, OuterOptimizerConfig
from outer.state.alignment import GRID_BITS, UNCHANGED, find_blend
from outer.state.optimizer import OuterOptimizer

MOMENTUM = 0.5
NUM_ELEMENTS = 40_000
"""More than one chunk of the sums."""
COARSE = 2.0 ** (1 - GRID_BITS)


def config(**align: float) -> OuterOptimizerConfig:
    return OuterOptimizerConfig(momentum=MOMENTUM, align=AlignConfig(**align))


def at_cosine(cosine: float, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """A pseudo-gradient of this length and a momentum of length 2, in fp64, with this cosine."""
    first, second = torch.randn(
        2, NUM_ELEMENTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    along = first / first.norm()
    across = second - second.dot(along) * along
    return length * (cosine * along + math.sqrt(1 - cosine**2) * across / across.norm()), 2 * along


def by_equations(mean: Tensor, momentum: Tensor, align: AlignConfig) -> Tensor:
    """The paper's rule in fp64, with its momentum, a running mean."""
    running = (1 - MOMENTUM) * momentum
    u, v = mean / mean.norm(), running / running.norm()
    c = u.dot(v).item()
    trust = (mean.norm() / (mean.norm() + align.doubt * running.norm())).item()
    if c >= align.keep:
        return mean
    if c < 0:
        return mean - min(align.shrink * -c * trust, align.most) * c * mean.norm() * v
    t = min(align.turn * (1 - c) * trust, 1.0)
    w = (1 - t) * u + t * v
    return mean.norm() * w / w.norm()


ALIGNS: list[dict[str, float]] = [
    {},
    {"keep": 0.2},
    {"keep": 0.6, "turn": 3.0},
    {"shrink": 9.0, "most": 0.7},
    {"doubt": 0.0},
]


@pytest.mark.parametrize("align", ALIGNS, ids=str)
@pytest.mark.parametrize("cosine", [-0.99, -0.3, -0.01, 0.05, 0.4, 0.8])
@pytest.mark.parametrize("length", [0.1, 3.0])
def test_the_equations_hold(align: dict[str, float], cosine: float, length: float) -> None:
    mean, momentum = at_cosine(cosine, length)
    found = find_blend(mean.float(), momentum.float(), config(**align)).apply(
        mean.float(), momentum.float()
    )
    expected = by_equations(mean, momentum, AlignConfig(**align))
    assert (found.double() - expected).norm() < 2 * COARSE * mean.norm()


@pytest.mark.parametrize("cosine", [0.2001, 0.6, 1.0])
def test_a_pseudo_gradient_that_agrees_is_left_alone(cosine: float) -> None:
    mean, momentum = (values.float() for values in at_cosine(cosine))
    assert find_blend(mean, momentum, config(keep=0.2)) is UNCHANGED
    assert UNCHANGED.apply(mean, momentum) is mean


def test_one_that_points_against_the_momentum_loses_that_part_and_nothing_else() -> None:
    mean, momentum = at_cosine(-0.8)
    found = find_blend(mean.float(), momentum.float(), config(shrink=100.0)).apply(
        mean.float(), momentum.float()
    )
    along = momentum / momentum.norm()
    assert abs(found.double().dot(along)) < 2 * COARSE, "most is 1: all of it is taken away"
    across = mean - mean.dot(along) * along
    assert (found.double() - across).norm() < 2 * COARSE


def test_one_that_hardly_agrees_keeps_its_length_and_agrees_more() -> None:
    mean, momentum = at_cosine(0.1)
    blend = find_blend(mean.float(), momentum.float(), config(keep=0.2))
    found = blend.apply(mean.float(), momentum.float()).double()
    assert abs(found.norm() - mean.norm()) < 2 * COARSE
    assert found.dot(momentum) / found.norm() / momentum.norm() > 0.15


@pytest.mark.parametrize(
    ("mean", "momentum"),
    [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (-1.0, 1e-38), (-1e-38, 1e10)],
    ids=str,
)
def test_without_a_direction_nothing_changes(mean: float, momentum: float) -> None:
    assert find_blend(torch.full((64,), mean), torch.full((64,), momentum), config()) is UNCHANGED


def test_sums_in_another_order_give_the_same_blend() -> None:
    mean, momentum = (values.float() for values in at_cosine(-0.31))
    order = torch.randperm(NUM_ELEMENTS, generator=torch.Generator().manual_seed(1))
    assert find_blend(mean, momentum, config()) == find_blend(
        mean[order], momentum[order], config()
    )


def test_the_outer_step_is_made_along_what_the_rule_gives() -> None:
    mean, momentum = (values.float() for values in at_cosine(-0.8))
    changed = find_blend(mean, momentum, config()).apply(mean, momentum)
    plain = config().model_copy(update={"align": None})
    assert torch.equal(stepped(config(), momentum, mean), stepped(plain, momentum, changed))
    assert not torch.equal(stepped(config(), momentum, mean), stepped(plain, momentum, mean))


def stepped(settings: OuterOptimizerConfig, momentum: Tensor, mean: Tensor) -> Tensor:
    """Zeros after one outer step."""
    params = torch.zeros(NUM_ELEMENTS)
    optimizer = OuterOptimizer({0: params}, settings)
    optimizer.set_momentum(0, momentum)
    optimizer.step({0: mean})
    return params


@pytest.mark.parametrize("values", [{"momentum": 0.0, "nesterov": False, "align": {}}], ids=str)
def test_without_momentum_there_is_nothing_to_align_with(values: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError,
        match="align compares pseudo-gradients with the momentum, but momentum is 0",
    ):
        OuterOptimizerConfig.model_validate(values)
