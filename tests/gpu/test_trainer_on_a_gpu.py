"""One rank's trainer on a GPU computes what it computes on the CPU: `python -m pytest -m gpu
tests/gpu`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from inner.checkpoint.save_load import Checkpoints
from inner.checkpoint.state import live_tensors
from inner.config import ContextMethod, ParallelConfig
from inner.model.attention import causal_attention
from inner.model.sizes import ModelSizes
from inner.parallel.context.build import build_attend
from inner.params import LocalParams
from inner.trainer import Trainer
from scripts.gpu_report.place import Place
from scripts.gpu_report.training import TrainingCase, one_rank
from tests.inner.sequences import BANDS, Case, Inputs, inputs, with_gradients
from tests.inner.small import relative_error

pytestmark = pytest.mark.gpu

GPU = Place("cuda")
SIZES = ModelSizes(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=260)
LOSS_BANDS = {"float32": 1e-5, "bfloat16": 5e-3}
"""Relative differences of a loss that rounding can explain."""
TENSORS = "q", "k", "v", "dy"


@pytest.fixture(scope="module", autouse=True)
def an_island_of_one_rank() -> Iterator[None]:
    """The process groups of an island whose only rank has the GPU."""
    with one_rank(GPU):
        yield


def case(
    dtype: str = "float32", *, compiled: bool = False, documents: bool = False
) -> TrainingCase:
    parallel = ParallelConfig(compile=compiled)
    return TrainingCase(SIZES, 128, 2, dtype, 2, parallel=parallel, masks_documents=documents)


def losses(trainer: Trainer, training: TrainingCase, steps: range) -> list[float]:
    found = [trainer.step(training.windows(number)).loss for number in steps]
    assert None not in found
    return [loss for loss in found if loss is not None]


def test_the_process_group_is_nccl_s_for_what_lies_on_the_gpu() -> None:
    values = torch.ones(3, device=GPU.first)
    dist.all_reduce(values)
    assert values.tolist() == [1.0] * 3
    assert "cuda:nccl" in str(dist.get_backend_config())


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", LOSS_BANDS)
def test_steps_are_those_of_the_cpu(dtype: str, compiled: bool, documents: bool) -> None:
    eager = case(dtype, documents=documents)
    expected = losses(eager.build("cpu"), eager, range(3))
    training = case(dtype, compiled=compiled, documents=documents)
    found = losses(training.build(GPU.first), training, range(3))
    assert found == pytest.approx(expected, rel=LOSS_BANDS[dtype])


@pytest.mark.parametrize("dtype", LOSS_BANDS)
def test_an_evaluation_is_that_of_the_cpu(dtype: str) -> None:
    training = case(dtype)
    on_cpu, tokens = training.build("cpu").evaluate(training.windows(5))
    on_gpu, as_many = training.build(GPU.first).evaluate(training.windows(5))
    assert as_many == tokens
    assert on_gpu == pytest.approx(on_cpu, rel=LOSS_BANDS[dtype])


def test_a_resumed_trainer_has_the_saved_state_bit_for_bit_and_goes_on_alike(
    tmp_path: Path,
) -> None:
    training = case("bfloat16")
    trainer = training.build(GPU.first)
    losses(trainer, training, range(2))
    checkpoints = Checkpoints(tmp_path, keep=1, timeout_seconds=60)
    checkpoints.save(trainer, {}, wait=True)
    saved = state_of(trainer)
    expected = losses(trainer, training, range(2, 4))

    resumed = training.build(GPU.first)
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(resumed, newest)
    checkpoints.close()
    loaded = state_of(resumed)
    assert loaded.keys() == saved.keys()
    assert [name for name, values in saved.items() if not torch.equal(loaded[name], values)] == []
    # Kernels that add up in any order may differ in the last bits.
    assert losses(resumed, training, range(2, 4)) == pytest.approx(expected, rel=1e-4)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of parameters and optimizer states, by name."""
    live = live_tensors(trainer.model_parts, trainer.optimizers)
    return {name: copies[0].detach().to("cpu", copy=True) for name, copies in live.items()}


def test_values_cross_the_seam_whole_while_the_gpu_is_busy() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to(GPU.first)
    params = LocalParams(model, [model])
    indices = range(len(params.slices))
    busy = torch.randn(4096, 4096, device=GPU.first)
    for turn in range(20):
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)
        write_pinned(params, turn)
        # torch must not hand out memory that a copy still reads: what gets it overwrites it.
        for index in indices:
            place = params.pinned(index)
            assert place is not None
            place.fill_(-1.0)
        for index, values in params.read_all(indices).items():
            assert (values == 100 * turn + index).all(), f"turn {turn}, slice {index}"


def write_pinned(params: LocalParams, turn: int) -> None:
    """Write values that tell turn and slice, from page-locked memory that nobody holds
    afterwards.
    """
    values = {}
    for index in range(len(params.slices)):
        place = params.pinned(index)
        assert place is not None
        values[index] = place.fill_(float(100 * turn + index))
    params.write_all(values)


@pytest.mark.parametrize("has_documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("method", get_args(ContextMethod))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_context_methods_in_a_group_of_one_are_plain_attention(
    dtype: torch.dtype, method: ContextMethod, has_documents: bool
) -> None:
    given = inputs(Case(method, 2, has_documents, dtype), 256)
    mine = given._replace(**{name: getattr(given, name).to(dtype) for name in TENSORS})
    group = dist.group.WORLD
    assert group is not None
    found = with_gradients(build_attend(method, group), on_gpu(mine))
    for got, wanted in zip(found, with_gradients(causal_attention, mine), strict=True):
        assert relative_error(got.cpu().double(), wanted.double()) <= BANDS[dtype]


def on_gpu(given: Inputs) -> Inputs:
    packing = given.packing
    if packing is not None:
        packing = replace(packing, bounds_N=packing.bounds_N.to(GPU.first))
    return given._replace(
        packing=packing, **{name: getattr(given, name).to(GPU.first) for name in TENSORS}
    )
