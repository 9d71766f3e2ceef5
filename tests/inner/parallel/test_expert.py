"""Experts on several ranks: optimizers, checkpoints, and ranks that no token reaches. tests/parity
has the meshes.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from inner.checkpoint.save_load import Checkpoints
from inner.checkpoint.state import live_tensors
from inner.config import BalanceConfig, ExpertsConfig, ParallelConfig
from inner.errors import InputError
from inner.mesh import Degrees
from inner.model.experts import mixtures
from inner.model.sizes import ModelSizes
from inner.params import local_tensor
from inner.trainer import Trainer
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, batch, build_trainer, relative_error, share, whole_model
from tests.parity.meshes import with_wide_routers

EXPERTS = ExpertsConfig(number=4, per_token=2, dim=24, shared=1, scores="sigmoid")
SIZES = ModelSizes(
    dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61, experts=EXPERTS
)
# With two experts on two ranks of ep, two ranks of edp cut the rows of one expert.
CUT = replace(SIZES, experts=EXPERTS.model_copy(update={"number": 2, "per_token": 1}))
BALANCE = BalanceConfig(bias_speed=0.01, sequence_loss=0.05, router_z_loss=0.01)
ADAMW = OPTIMIZER.model_copy(update={"balance": BALANCE, "clip_norm": None})
NORMUON = ADAMW.model_copy(update={"name": "muon", "muon_row_beta": 0.9})
ONE = Degrees()
STEPS = 3


def mixed_trainer(
    degrees: Degrees, sizes: ModelSizes, config: Any = ADAMW, **settings: Any
) -> Trainer:
    settings = {"micro_batch": 3, "draw_weights": with_wide_routers} | settings
    return build_trainer(degrees, sizes, config, ParallelConfig(), **settings)


def train(trainer: Trainer, num_steps: int = STEPS) -> list[float | None]:
    return [trainer.step(share(trainer, batch(trainer.inner_step))).loss for _ in range(num_steps)]


def trained_on_a_rank(
    rank: int, degrees: Degrees, sizes: ModelSizes, config: Any
) -> tuple[Any, Any, bool]:
    trainer = mixed_trainer(degrees, sizes, config)
    before = whole_model(trainer.params)[0]
    train(trainer)
    stacks = [each.experts.gate_proj.weight for each in mixtures(trainer.model_parts)]
    is_cut = any(local_tensor(stack).shape[1] < stack.shape[1] for stack in stacks)
    return before, whole_model(trainer.params)[0], is_cut


@pytest.mark.parametrize(
    ("degrees", "sizes", "is_cut"),
    [
        (Degrees(dp_shard=2), SIZES, False),
        (Degrees(dp_shard=4, ep=2), SIZES, False),
        (Degrees(dp_shard=2, tp=2, ep=2), SIZES, False),
        (Degrees(dp_shard=4, ep=2), CUT, True),
    ],
    ids=["dp_shard2", "dp_shard4-ep2", "dp_shard2-tp2-ep2", "dp_shard4-ep2-cut"],
)
def test_muon_steps_each_expert_as_a_matrix_on_every_mesh(
    degrees: Degrees, sizes: ModelSizes, is_cut: bool
) -> None:
    first, expected, _ = run_ranks(trained_on_a_rank, 1, ONE, sizes, NORMUON)[0]
    _, got, was_cut = run_ranks(trained_on_a_rank, degrees.num_ranks, degrees, sizes, NORMUON)[0]
    assert was_cut == is_cut
    for name, value in expected.items():
        assert relative_error(got[name] - first[name], value - first[name]) < 2e-3, name


def test_muon_orthogonalises_an_expert_as_it_does_a_matrix() -> None:
    first, last, _ = run_ranks(
        trained_on_a_rank, 1, ONE, SIZES, NORMUON.model_copy(update={"muon_row_beta": None})
    )[0]
    change = (
        last["layers.1.ffn.experts.2.up_proj.weight"]
        - first["layers.1.ffn.experts.2.up_proj.weight"]
    )
    values = torch.linalg.svdvals(change)
    # An orthogonal change has equal singular values; AdamW's has one that is many times the others.
    assert float(values.max() / values.median()) < 3


def decayed_on_a_rank(rank: int) -> tuple[float, float]:
    config = ADAMW.model_copy(
        update={"lr": 0.1, "weight_decay": 0.5, "warmup_steps": 0, "schedule": "constant"}
    )
    trainer = mixed_trainer(ONE, SIZES, config)
    stack = mixtures(trainer.model_parts)[0].experts.up_proj.weight
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    (of_stack,) = (group for group in groups if any(param is stack for param in group["params"]))
    bias_like = trainer.model_parts[0].get_parameter("norm.weight")
    (of_norm,) = (group for group in groups if any(param is bias_like for param in group["params"]))
    return of_stack["weight_decay"], of_norm["weight_decay"]


def test_matrices_of_experts_decay_like_matrices() -> None:
    assert run_ranks(decayed_on_a_rank, 1)[0] == (0.5, 0.0)


def starved_on_a_rank(
    rank: int, degrees: Degrees
) -> tuple[dict[str, Tensor], int, list[float | None]]:
    trainer = mixed_trainer(degrees, SIZES)
    for mixture in mixtures(trainer.model_parts):
        mixture.router.bias[2:] = -100.0
    losses = train(trainer)
    received = 0
    for mixture in mixtures(trainer.model_parts):
        grads = [module.get_parameter("weight").grad for module in mixture.experts.children()]
        assert all(grad is None for grad in grads), "gradients are dropped after a step"
    result = trainer.step(share(trainer, batch(trainer.inner_step)))
    assert result.routing is not None
    received = sum(sum(counts[2:]) for counts in result.routing.counts)
    return whole_model(trainer.params)[0], received, losses


@pytest.mark.parametrize("degrees", [Degrees(dp_shard=2, ep=2), Degrees(tp=2, ep=2)], ids=str)
def test_a_rank_that_no_token_reaches_takes_part_with_gradients_of_zero(degrees: Degrees) -> None:
    expected, none, losses = run_ranks(starved_on_a_rank, 1, ONE)[0]
    got, also_none, losses_there = run_ranks(starved_on_a_rank, 2, degrees)[0]
    assert none == also_none == 0
    assert losses_there == pytest.approx(losses, rel=1e-5)
    for name, value in expected.items():
        assert relative_error(got[name], value) < 1e-4, name


def dtypes_on_a_rank(
    rank: int, degrees: Degrees
) -> tuple[set[torch.dtype], set[torch.dtype], list[float | None]]:
    trainer = mixed_trainer(degrees, SIZES, compute_dtype="bfloat16")
    routers: set[torch.dtype] = set()
    experts: set[torch.dtype] = set()
    for mixture in mixtures(trainer.model_parts):
        mixture.router.register_forward_hook(lambda module, *_: routers.add(module.weight.dtype))
        mixture.experts.up_proj.register_forward_hook(
            lambda module, *_: experts.add(module.weight.dtype)
        )
    return routers, experts, train(trainer)


@pytest.mark.parametrize(
    "degrees",
    [ONE, Degrees(dp_shard=2), Degrees(dp_shard=2, ep=2), Degrees(tp=2, ep=2), Degrees(tp=2)],
    ids=str,
)
def test_in_bfloat16_experts_compute_in_it_and_routers_in_fp32(degrees: Degrees) -> None:
    _, _, expected = run_ranks(dtypes_on_a_rank, 1, ONE)[0]
    for routers, experts, losses in run_ranks(dtypes_on_a_rank, degrees.num_ranks, degrees):
        assert (routers, experts) == ({torch.float32}, {torch.bfloat16})
        assert losses == pytest.approx(expected, rel=5e-3)


def digests(trainer: Trainer) -> dict[str, str]:
    """A hash of every whole tensor that a checkpoint has, the same wherever it is held."""
    mine = {}
    for name, copies in live_tensors(trainer.model_parts, trainer.optimizers).items():
        whole = copies[0].full_tensor() if isinstance(copies[0], DTensor) else copies[0]
        mine[name] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: digest for one in everyone for name, digest in one.items()}


def saved_on_a_rank(
    rank: int, degrees: Degrees, folder: Path
) -> tuple[dict[str, str], list[float]]:
    trainer = mixed_trainer(degrees, SIZES, NORMUON)
    train(trainer)
    checkpoints = Checkpoints(folder, keep=2, timeout_seconds=60)
    checkpoints.save(trainer, {}, wait=True)
    checkpoints.close()
    return digests(trainer), mixtures(trainer.model_parts)[0].router.bias.tolist()


def loaded_on_a_rank(
    rank: int, degrees: Degrees, folder: Path
) -> tuple[dict[str, str], list[float]]:
    trainer = mixed_trainer(degrees, SIZES, NORMUON, seed=99)
    checkpoints = Checkpoints(folder, keep=2, timeout_seconds=60)
    found = checkpoints.newest()
    assert found is not None
    checkpoints.load(trainer, found)
    checkpoints.close()
    return digests(trainer), mixtures(trainer.model_parts)[0].router.bias.tolist()


@pytest.mark.parametrize(
    "degrees",
    [ONE, Degrees(dp_shard=2), Degrees(dp_shard=4, ep=4), Degrees(pp=2, dp_shard=2, ep=2)],
    ids=str,
)
def test_any_mesh_loads_what_another_saved_with_the_biases_of_its_routers(
    tmp_path: Path, degrees: Degrees
) -> None:
    from_mesh = Degrees(dp_shard=2, tp=2, ep=2)
    saved, bias = run_ranks(saved_on_a_rank, from_mesh.num_ranks, from_mesh, tmp_path)[0]
    loaded, same_bias = run_ranks(loaded_on_a_rank, degrees.num_ranks, degrees, tmp_path)[0]
    assert loaded == saved
    assert same_bias == bias and any(bias)
    assert {
        "buffers/layers.0.ffn.router.bias",
        "params/layers.1.ffn.experts.down_proj.weight",
    } <= saved.keys()


def refused_on_a_rank(
    rank: int, degrees: Degrees, sizes: ModelSizes, parallel: ParallelConfig
) -> str:
    try:
        build_trainer(degrees, sizes, ADAMW, parallel)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("degrees", "sizes", "parallel", "texts"),
    [
        (
            Degrees(dp_shard=2, ep=2),
            replace(SIZES, experts=None),
            ParallelConfig(),
            ["island.mesh.ep", "model.experts"],
        ),
        (
            Degrees(dp_shard=2, ep=2),
            replace(SIZES, experts=EXPERTS.model_copy(update={"number": 3})),
            ParallelConfig(),
            ["island.mesh.ep (2) must divide model.experts.number (3)", "number to 2 or 4"],
        ),
        (
            Degrees(dp_shard=2),
            SIZES,
            ParallelConfig(compile=True),
            ["island.parallel.compile", "auto"],
        ),
        (
            Degrees(cp=2),
            replace(SIZES, experts=EXPERTS.model_copy(update={"capacity": 1.0})),
            ParallelConfig(),
            ["model.experts.capacity", "set both to 1"],
        ),
    ],
    ids=["dense", "no divisor", "compiled", "capacity"],
)
def test_what_a_mesh_cannot_do_is_refused_on_every_rank(
    degrees: Degrees, sizes: ModelSizes, parallel: ParallelConfig, texts: list[str]
) -> None:
    for message in run_ranks(refused_on_a_rank, 2, degrees, sizes, parallel):
        assert all(text in message for text in texts), message
