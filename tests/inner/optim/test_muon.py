"""Muon and NorMuon equal their equations in fp64, Muon that of torch, and both are the same on
every mesh.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from inner.config import OptimizerConfig, ParallelConfig
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes
from inner.optim.muon.muon import Muon
from inner.optim.muon.orthogonalise import (
    newton_schulz,
    normalise_rows,
    orthogonalise,
    product_dtype,
)
from tests.harness import run_ranks
from tests.inner.small import (
    OPTIMIZER,
    SEQUENCES,
    batch,
    build_trainer,
    relative_error,
    share,
    whole_model,
)

# Tall, wide, square, fewer rows than ranks. Neither count nor sizes are multiples of 2 or 4 ranks.
SHAPES = [(50, 32), (32, 50), (17, 17), (3, 40), (41, 5)]
LR, MOMENTUM, DECAY, STEPS = 0.02, 0.9, 0.1, 4
ROW_BETAS = {"muon": None, "normuon": 0.8}


def matrices(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def plain_muon(row_beta: float | None) -> list[Tensor]:
    """The equations on full matrices in fp64."""
    rows = [torch.zeros(s[0], 1, dtype=torch.float64) for s in SHAPES]
    values, averages = [
        [m.double() for m in matrices(0)],
        [torch.zeros(s, dtype=torch.float64) for s in SHAPES],
    ]
    for step in range(STEPS):
        for value, average, row, grad in zip(
            values, averages, rows, matrices(1 + step), strict=True
        ):
            average.mul_(MOMENTUM).add_(grad.double(), alpha=1 - MOMENTUM)
            ahead = MOMENTUM * average + (1 - MOMENTUM) * grad.double()
            u, s, v = torch.linalg.svd(ahead / ahead.norm(), full_matrices=False)
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            update, scale = u * s @ v, LR * 0.2 * max(value.shape) ** 0.5
            if row_beta is not None:
                row.mul_(row_beta).add_((1 - row_beta) * update.square().mean(dim=1, keepdim=True))
                update = update / row.sqrt()
                # The paper's own scale.
                scale = LR * 0.2 * value.numel() ** 0.5 / update.norm()
            value.mul_(1 - LR * DECAY).sub_(scale * update)
    return values


Spread = tuple[tuple[int, ...], list[Placement]]
"""Shape of a mesh, and the placements of matrices on it."""

SPREADS: dict[int, list[Spread]] = {
    1: [((1,), [Shard(0)])],
    2: [((2,), [Shard(0)]), ((2,), [Shard(1)]), ((2,), [Replicate()])],
    4: [
        ((4,), [Shard(0)]),
        ((1, 4), [Replicate(), Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
    ],
}


def all_spreads(_: int, num_ranks: int) -> dict[str, list[list[Tensor]]]:
    """Full matrices after some steps, by optimizer, for each way to shard them."""
    return {
        kind: [step_all(*spread, ROW_BETAS[kind]) for spread in SPREADS[num_ranks]]
        for kind in ROW_BETAS
    }


def step_all(
    shape: tuple[int, ...], placements: list[Placement], row_beta: float | None
) -> list[Tensor]:
    mesh = init_device_mesh("cpu", shape)

    def spread(values: list[Tensor]) -> list[Any]:
        return [distribute_tensor(value, mesh, placements, src_data_rank=None) for value in values]

    params = [nn.Parameter(value) for value in spread(matrices(0))]
    optimizer = Muon(
        [{"params": list(params), "weight_decay": DECAY}], LR, MOMENTUM, row_beta=row_beta
    )
    for step in range(STEPS):
        for param, grad in zip(params, spread(matrices(1 + step)), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach().full_tensor() for param in params]  # pyright: ignore


@pytest.fixture(scope="module")
def one() -> dict[str, list[Tensor]]:
    return {kind: spreads[0] for kind, spreads in run_ranks(all_spreads, 1, 1)[0].items()}


@pytest.mark.parametrize("kind", ROW_BETAS)
def test_the_equations_hold(one: dict[str, list[Tensor]], kind: str) -> None:
    for got, expected in zip(one[kind], plain_muon(ROW_BETAS[kind]), strict=True):
        assert relative_error(got, expected) < 1e-5


def test_it_is_torchs_muon_but_for_rounding_in_bf16(one: dict[str, list[Tensor]]) -> None:
    params = [nn.Parameter(value) for value in matrices(0)]
    theirs = torch.optim.Muon(
        params,
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(STEPS):
        for param, grad in zip(params, matrices(1 + step), strict=True):
            param.grad = grad
        theirs.step()
    for got, param, first in zip(one["muon"], params, matrices(0), strict=True):
        assert 0 < (got - param).norm() / (param - first).norm() < 0.03


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equal_gradients_give_equal_bits_on_every_mesh(
    one: dict[str, list[Tensor]], num_ranks: int
) -> None:
    for of_rank in run_ranks(all_spreads, num_ranks, num_ranks):
        for kind, results in of_rank.items():
            for spread, got in zip(SPREADS[num_ranks], results, strict=True):
                assert all(map(torch.equal, got, one[kind])), (kind, spread)


def test_normuon_gives_all_rows_of_the_first_update_one_length() -> None:
    for matrix in matrices(5):
        update, rows = normalise_rows(newton_schulz(matrix), torch.zeros(len(matrix)), 0.95)
        assert torch.allclose(
            update.norm(dim=1), update.norm(dim=1).mean().expand(len(matrix)), rtol=1e-5
        )
        assert update.norm().item() == pytest.approx(min(matrix.shape) ** 0.5, rel=1e-5)
        assert torch.allclose(rows, 0.05 * newton_schulz(matrix).square().mean(dim=1))


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_1_and_directions_stay(shape: tuple[int, int]) -> None:
    (matrix,) = [m for m in matrices(5) if m.shape == shape]
    result = newton_schulz(matrix)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    core = u.T @ result @ v.T
    assert core.diagonal().min() > 0.3 and core.diagonal().max() < 1.3
    assert (core - core.diagonal().diag()).abs().max() < 1e-4


def test_products_in_bf16_change_a_matrix_by_a_few_percent() -> None:
    for matrix in matrices(5):
        exact, rounded = newton_schulz(matrix), newton_schulz(matrix, torch.bfloat16)
        assert rounded.dtype == torch.float32
        assert 0 < relative_error(rounded, exact) < 0.1


def test_only_an_accelerator_that_computes_in_bf16_multiplies_in_it() -> None:
    assert product_dtype("cuda", torch.bfloat16) == torch.bfloat16
    assert (
        product_dtype("cuda", torch.float32)
        == product_dtype("cpu", torch.bfloat16)
        == torch.float32
    )


def shared_on_a_rank(_: int) -> int:
    """Operations of this rank of four, which orthogonalise four matrices together."""
    mesh, spread = init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
    matrices = [
        distribute_tensor(torch.randn(8, 6), mesh, spread, src_data_rank=None) for _ in range(4)
    ]
    with FlopCounterMode(display=False) as counter:
        orthogonalise(matrices)
    return counter.get_total_flops()


def test_every_rank_of_a_mesh_orthogonalises_its_share() -> None:
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(8, 6))
    assert run_ranks(shared_on_a_rank, 4) == [counter.get_total_flops()] * 4


def test_a_gradient_of_zero_moves_nothing() -> None:
    assert torch.equal(newton_schulz(torch.zeros(4, 7)), torch.zeros(4, 7))


SIZES = ModelSizes(
    dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61, qk_norm=True
)
CONFIG = OptimizerConfig.model_validate(OPTIMIZER.model_dump() | {"name": "muon"})
MESHES = {
    "one": Degrees(),
    "fsdp2": Degrees(dp_shard=2),
    "fsdp4": Degrees(dp_shard=4),
    "hsdp2x2": Degrees(dp_replicate=2, dp_shard=2),
    "fsdp2-tp2": Degrees(dp_shard=2, tp=2),
    # Two key-value heads for four ranks: their projections are replicated.
    "tp4": Degrees(tp=4),
    "pp2-fsdp2": Degrees(pp=2, dp_shard=2),
}
OTHERS = [name for name in MESHES if name != "one"]
TRAINED = 6
"""Steps."""


@dataclass
class Life:
    """The model before, after one step and after the last, and the loss of each step."""

    models: list[dict[str, Tensor]]
    losses: list[float | None]


def live(_: int, num_ranks: int) -> dict[str, Life]:
    return {
        name: train(degrees) for name, degrees in MESHES.items() if degrees.num_ranks == num_ranks
    }


def train(degrees: Degrees) -> Life:
    # As few micro-batches as possible, because Muon sees only their sum.
    micro_batch = SEQUENCES // degrees.num_data_ranks // degrees.pp
    trainer = build_trainer(degrees, SIZES, CONFIG, ParallelConfig(), micro_batch=micro_batch)
    life = Life([whole_model(trainer.params)[0]], [])
    for step in range(TRAINED):
        life.losses.append(trainer.step(share(trainer, batch(step))).loss)
        if step in (0, TRAINED - 1):
            life.models.append(whole_model(trainer.params)[0])
    return life


@pytest.fixture(scope="module")
def lives() -> dict[str, Life]:
    return {
        name: life
        for n in (1, 2, 4)
        for name, life in run_ranks(live, n, n, timeout_seconds=200)[0].items()
    }


def test_training_learns(lives: dict[str, Life]) -> None:
    first, last = lives["one"].losses[0], lives["one"].losses[-1]
    assert first is not None and last is not None and last < first - 0.1


@pytest.mark.parametrize("name", OTHERS)
def test_training_on_a_mesh_equals_one_process(lives: dict[str, Life], name: str) -> None:
    first, *expected = lives["one"].models
    # In the first step the iteration amplifies rounding of the gradient; over later steps this
    # averages out.
    for after, tolerance in enumerate((5e-5, 1e-5)):
        for param, value in expected[after].items():
            if param.startswith("layers.") and not param.endswith("norm.weight"):
                got = lives[name].models[1 + after][param]
                assert relative_error(got - first[param], value - first[param]) < tolerance, (
                    param,
                    after,
                )
