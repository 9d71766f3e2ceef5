"""Primal averaging against its equations in fp64, its base optimizer, and itself on other meshes
and after a stop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inner.config import OptimizerConfig
from inner.errors import InputError
from inner.mesh import Degrees
from inner.optim.primal_averaging import OFFSET, PrimalAveraging
from inner.params import local_tensor
from inner.trainer import Trainer
from tests.harness import run_ranks
from tests.inner.checkpoint_crash import open_checkpoints
from tests.inner.small import (
    OPTIMIZER,
    batch,
    build_trainer,
    relative_error,
    share,
    snapshot,
    whole_model,
)

SHAPE, STEPS, LR, DECAY, BETAS, EPS = (7, 5), 20, 0.02, 0.5, (0.9, 0.95), 1e-8
AVERAGING = {"x": 0.9, "y": 0.7}

Step = Callable[[Tensor, Tensor, int], Tensor]
"""The base optimizer's new z of z, the gradient and the step, counted from 1."""


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def gradient(y: Tensor, step: int) -> Tensor:
    """Of some function that is another one in each step; in the dtype of y."""
    return (2.0 * y).sin() + torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).to(
        y.dtype
    )


def plain_adamw() -> Step:
    m, v = torch.zeros(2, *SHAPE, dtype=torch.float64)

    def step(z: Tensor, grad: Tensor, t: int) -> Tensor:
        m.mul_(BETAS[0]).add_((1 - BETAS[0]) * grad)
        v.mul_(BETAS[1]).add_((1 - BETAS[1]) * grad**2)
        return (
            z
            - LR * DECAY * z
            - LR * (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
        )

    return step


def plain_sgd() -> Step:
    return lambda z, grad, t: z - LR * (grad + DECAY * z)


def adamw(param: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param], lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS, fused=True)


def sgd(param: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([param], lr=LR, weight_decay=DECAY)


BASES = {"adamw": (adamw, plain_adamw), "sgd": (sgd, plain_sgd)}


@pytest.mark.parametrize(("mu_x", "mu_y"), [(0.9, 0.7), (0.9967, 0.7), (0.5, 0.01), (0.9, 1.0)])
@pytest.mark.parametrize("base", BASES)
def test_the_three_equations_hold(base: str, mu_x: float, mu_y: float) -> None:
    make, plain = BASES[base]
    param = nn.Parameter(start())
    optimizer = PrimalAveraging(make(param), mu_x, mu_y)
    base_step = plain()
    x = z = start().double()
    for t in range(1, STEPS + 1):
        y = mu_y * x + (1 - mu_y) * z
        assert relative_error(param.detach(), y) < 2e-6
        z = base_step(z, gradient(y, t), t)
        x = mu_x * x + (1 - mu_x) * z
        param.grad = gradient(param.detach(), t)
        optimizer.step()
    offset = optimizer.state[param][OFFSET]
    assert relative_error(offset, x - z) < 1e-5
    # The average lags behind.
    assert relative_error(x, z) > 0.01


def test_who_writes_params_moves_all_three_points_alike() -> None:
    def written(change: Tensor) -> Tensor:
        param = nn.Parameter(start())
        optimizer = PrimalAveraging(torch.optim.SGD([param], lr=LR), 0.9, 0.7)
        for t in range(1, STEPS + 1):
            param.grad = gradient(start(), t)
            optimizer.step()
            if t == STEPS // 2:
                param.data.add_(change)
        return param.detach()

    change = torch.full(SHAPE, 0.25)
    assert relative_error(written(change) - written(torch.zeros(SHAPE)), change) < 1e-5


# In a trainer.


def config(name: str, averaging: dict[str, float] | None) -> OptimizerConfig:
    return OptimizerConfig.model_validate(
        OPTIMIZER.model_dump() | {"name": name, "averaging": averaging}
    )


def train(trainer: Trainer, num_steps: int) -> list[float | None]:
    """The losses of the next steps; which data a step reads depends on its number."""
    return [trainer.step(share(trainer, batch(trainer.inner_step))).loss for _ in range(num_steps)]


def trajectories_on_a_rank(rank: int, name: str) -> list[list[Tensor]]:
    """The params after each step: of the base optimizer alone, and where x has no memory."""
    found = []
    for averaging in (None, {"x": 0.0, "y": 0.7}):
        trainer = build_trainer(Degrees(), config=config(name, averaging))
        found.append(
            [piece for _ in range(3) for piece in (train(trainer, 1), snapshot(trainer.params))[1]]
        )
    return found


# Muon is combined with AdamW.
@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_without_memory_it_is_the_base_optimizer_bit_for_bit(name: str) -> None:
    ((alone, averaged),) = run_ranks(trajectories_on_a_rank, 1, name)
    assert all(map(torch.equal, averaged, alone))


def models_on_a_rank(
    rank: int, meshes: list[Degrees], name: str
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The whole model before the first and after the fifth step, on each mesh in turn."""
    found = []
    for degrees in meshes:
        trainer = build_trainer(degrees, config=config(name, AVERAGING))
        before = whole_model(trainer.params)[0]
        train(trainer, 5)
        found.append((before, whole_model(trainer.params)[0]))
        assert_offsets_lie_like_params(trainer)
    return found


def assert_offsets_lie_like_params(trainer: Trainer) -> None:
    states = {
        param: state for optimizer in trainer.optimizers for param, state in optimizer.state.items()
    }
    for model in trainer.model_parts:
        for param in model.parameters():
            offset = states[param][OFFSET]
            if isinstance(param, DTensor):
                assert offset.placements == param.placements
            assert (
                offset.dtype == torch.float32
                and local_tensor(offset).shape == local_tensor(param).shape
            )


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_training_on_a_mesh_equals_one_process(name: str) -> None:
    meshes = [Degrees(dp_shard=2), Degrees(tp=2)]
    ((first, expected),) = run_ranks(models_on_a_rank, 1, [Degrees()], name)[0]
    for _, got in run_ranks(models_on_a_rank, 2, meshes, name)[0]:
        for param, value in expected.items():
            # The base optimizers' own tolerance: AdamW amplifies rounding of gradients near zero.
            error = relative_error(got[param] - first[param], value - first[param])
            assert error < 2e-4, param


# In a checkpoint.


@dataclass
class Stopped:
    """Losses and params of a trainer that went on, and of one that loads what that had saved; and
    an error.
    """

    went_on: tuple[list[float | None], list[Tensor]]
    resumed: tuple[list[float | None], list[Tensor]]
    error: str


def stopped_on_a_rank(rank: int, folder: Path) -> Stopped:
    first, second, plain = (
        build_trainer(Degrees(dp_shard=2), config=config("adamw", averaging), seed=seed)
        for seed, averaging in ((1, AVERAGING), (2, AVERAGING), (3, None))
    )
    train(first, 2)
    # Offsets of its previous history must be dropped.
    train(second, 1)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(first, {}, wait=True)
    checkpoints.load(second, checkpoints.at(2))
    with pytest.raises(InputError) as error:
        checkpoints.load(plain, checkpoints.at(2))
    went_on, resumed = ((train(one, 2), snapshot(one.params)) for one in (first, second))
    return Stopped(went_on, resumed, str(error.value))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> list[Stopped]:
    return run_ranks(stopped_on_a_rank, 2, tmp_path_factory.mktemp("checkpoints"))


def test_training_goes_on_from_a_checkpoint_bit_for_bit(stopped: list[Stopped]) -> None:
    for of_rank in stopped:
        assert of_rank.resumed[0] == of_rank.went_on[0]
        assert all(map(torch.equal, of_rank.resumed[1], of_rank.went_on[1]))


def test_a_checkpoint_is_refused_where_nothing_is_averaged(stopped: list[Stopped]) -> None:
    for of_rank in stopped:
        assert (
            "embed.weight is stepped by AdamW here, but by averaged AdamW in the checkpoint"
            in of_rank.error
        )


# In the config.


@pytest.mark.parametrize(
    ("averaging", "text"),
    [
        ({"x": 1.0}, "averaging.x\n.*less than 1"),
        ({"x": -0.1}, "averaging.x\n.*greater than or equal to 0"),
        ({"x": float("nan")}, "averaging.x\n"),
        ({"x": 0.9, "y": 0.0}, "averaging.y\n.*greater than 0"),
        ({"x": 0.9, "y": 1.1}, "averaging.y\n.*less than or equal to 1"),
        ({"y": 0.7}, "averaging.x\n.*required"),
        ({"x": 0.9, "z": 0.1}, "averaging.z\n.*not permitted"),
    ],
)
def test_bad_values_are_refused_with_the_config(averaging: dict[str, float], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        OptimizerConfig.model_validate({"averaging": averaging})
