"""Replicas with whole weights train with the same bits as FSDP over the same replicas."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from inner.config import OptimizerConfig, ParallelConfig
from inner.mesh import Degrees, IslandMesh
from inner.model.sizes import PRESETS, ModelSizes
from inner.parallel.weights.replicas import ReplicaSums, replicate
from inner.parallel.weights.zero_stage import BUCKET_BYTES, cut_buckets, has_whole_weights
from inner.params import local_tensor
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, SIZES, batch, build_trainer, share, snapshot
from tests.parity.meshes import MIXTURE, with_wide_routers

STEPS = 3
TIED = replace(SIZES, num_layers=4, tie_embeddings=True)
WITH_NOISE = OPTIMIZER.model_copy(update={"noise_scale_every": 2})


@dataclass(frozen=True)
class Case:
    degrees: Degrees
    sizes: ModelSizes = SIZES
    dtype: str = "float32"
    schedule: str = "1f1b"
    micro_batch: int = 3
    optimizer: OptimizerConfig = OPTIMIZER


DP2, PP2_DP2 = Degrees(dp_replicate=2), Degrees(pp=2, dp_replicate=2)
CASES = {
    "fp32, noise scale": Case(DP2, optimizer=WITH_NOISE),
    "bf16, tied": Case(DP2, TIED, "bfloat16"),
    "bf16, experts": Case(DP2, MIXTURE, "bfloat16"),
    "Muon": Case(DP2, optimizer=OPTIMIZER.model_copy(update={"name": "muon"})),
    "tensor": Case(Degrees(dp_replicate=2, tp=2)),
    "gpipe": Case(PP2_DP2, TIED, schedule="gpipe"),
    "1f1b": Case(PP2_DP2, TIED, schedule="1f1b"),
    "interleaved 1f1b": Case(PP2_DP2, TIED, schedule="interleaved_1f1b"),
    "breadth first": Case(PP2_DP2, TIED, schedule="breadth_first"),
    "interleaved zero bubble": Case(PP2_DP2, TIED, schedule="interleaved_zero_bubble"),
    "zbv, bf16": Case(PP2_DP2, TIED, "bfloat16", schedule="zbv"),
    "dualpipev": Case(PP2_DP2, TIED, schedule="dualpipev", micro_batch=1),
}
FOUR = [name for name, case in CASES.items() if case.degrees.num_ranks == 4]
TWO = [name for name in CASES if name not in FOUR]


@dataclass
class Run:
    figures: list[tuple[float | None, float | None, object]]
    """Loss, gradient norm and noise of each step."""
    weights: list[Tensor]


def both(_: int, names: list[str]) -> dict[str, tuple[Run, Run]]:
    return {name: (train(CASES[name], 0), train(CASES[name], 2)) for name in names}


def train(case: Case, zero: int) -> Run:
    parallel = ParallelConfig.model_validate({"zero": zero, "schedule": case.schedule})
    draw = {"draw_weights": with_wide_routers} if case.sizes == MIXTURE else {}
    settings = {"micro_batch": case.micro_batch, "compute_dtype": case.dtype, **draw}
    trainer = build_trainer(case.degrees, case.sizes, case.optimizer, parallel, **settings)
    steps = [trainer.step(share(trainer, batch(step))) for step in range(STEPS)]
    return Run(
        [(step.loss, step.grad_norm, step.noise) for step in steps], snapshot(trainer.params)
    )


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, tuple[Run, Run]]]:
    return run_ranks(both, 2, TWO, timeout_seconds=280)


@pytest.fixture(scope="module")
def of_four() -> list[dict[str, tuple[Run, Run]]]:
    return run_ranks(both, 4, FOUR, timeout_seconds=280)


def assert_same_bits(whole: Run, wrapped: Run) -> None:
    assert None not in whole.figures[0][:2]
    assert whole.figures == wrapped.figures
    assert all(map(torch.equal, whole.weights, wrapped.weights))


@pytest.mark.parametrize("name", TWO)
def test_two_replicas_have_the_bits_of_fsdp(
    of_two: list[dict[str, tuple[Run, Run]]], name: str
) -> None:
    for of_rank in of_two:
        assert_same_bits(*of_rank[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_two_replicas_of_two_ranks_have_the_bits_of_fsdp(
    of_four: list[dict[str, tuple[Run, Run]]], name: str
) -> None:
    for of_rank in of_four:
        assert_same_bits(*of_rank[name])


# Buckets


class TwoLayers(nn.Module):
    """Three buckets: each layer fills one, and the table is in the last."""

    def __init__(self) -> None:
        super().__init__()
        width = BUCKET_BYTES // 4 // 1000 + 1
        self.embed = nn.Embedding(3, 5)
        self.layers = nn.ModuleList(nn.Linear(1000, width, bias=False) for _ in range(2))


def sums_on_a_rank(rank: int) -> list[tuple[bool, float]]:
    """Whether each parameter has no gradient before the end, and a gradient's value after it."""
    model = TwoLayers()
    mesh = IslandMesh(DP2, "cpu")
    replicate(model, mesh.copies)
    sums = ReplicaSums([model], mesh.copies_group)
    params = list(model.parameters())
    for number in range(2):
        sums.begin_backward(model, is_last=number == 1)
        # The second rank's gradients come in another order.
        for param in params if rank == 0 else reversed(params):
            sums.add(param, torch.full(param.shape, 1.0 + rank + 10 * number, dtype=torch.bfloat16))
    before = [param.grad is None for param in params]
    sums.finish()
    found = []
    for param, is_none in zip(params, before, strict=True):
        assert isinstance(param.grad, DTensor) and param.grad.placements == (Replicate(),)
        values = local_tensor(param.grad).unique()
        assert len(values) == 1
        found.append((is_none, float(values)))
    return found


def test_gradients_of_all_micro_batches_and_ranks_are_added_in_any_order() -> None:
    for found in run_ranks(sums_on_a_rank, 2):
        assert found == [(True, 1.0 + 2.0 + 11.0 + 12.0)] * 3


def incomplete_on_a_rank(_: int) -> str:
    model = nn.Linear(2, 2, bias=False)
    mesh = IslandMesh(Degrees(dp_replicate=dist.get_world_size()), "cpu")
    replicate(model, mesh.copies)
    sums = ReplicaSums([model], mesh.copies_group)
    sums.begin_backward(model, is_last=False)
    sums.add(next(model.parameters()), torch.ones(2, 2))
    try:
        sums.finish()
    except AssertionError as error:
        return str(error)
    return ""


def test_a_gradient_that_is_missing_in_the_last_backward_is_found() -> None:
    assert (
        run_ranks(incomplete_on_a_rank, 2)
        == ["a parameter got no gradient in the last backward of the step"] * 2
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1, 2, 3], [[0, 1, 2]]),
        ([BUCKET_BYTES, 1], [[0], [1]]),
        ([1, BUCKET_BYTES, 1, BUCKET_BYTES - 1], [[0, 1], [2, 3]]),
    ],
)
def test_a_bucket_ends_with_the_group_that_fills_it(
    sizes: list[int], expected: list[list[int]]
) -> None:
    assert list(cut_buckets(sizes)) == expected


# The rule


@pytest.mark.parametrize(
    ("degrees", "model", "zero", "expected"),
    [
        (Degrees(), SIZES, None, False),
        (DP2, SIZES, None, True),
        (DP2, PRESETS["8b"], None, True),
        (Degrees(cp=2), SIZES, None, True),
        (Degrees(cp=2), PRESETS["8b"], None, False),
        (Degrees(cp=2), PRESETS["8b"], 0, True),
        (Degrees(dp_replicate=2, cp=2, tp=8, pp=4), PRESETS["8b"], None, True),
        (Degrees(dp_replicate=2, dp_shard=2), SIZES, None, False),
        (DP2, SIZES, 3, False),
        (DP2, MIXTURE, None, True),
        (Degrees(dp_replicate=2, tp=2), MIXTURE, None, False),
        (Degrees(cp=2, ep=2), MIXTURE, None, False),
    ],
)
def test_weights_are_whole_where_nothing_else_is_gained(
    degrees: Degrees, model: ModelSizes, zero: int | None, expected: bool
) -> None:
    assert (
        has_whole_weights(ParallelConfig.model_validate({"zero": zero}), degrees, model) == expected
    )
