"""The roofline of a step counts the operations that a model makes, and the bytes that its matrix
products touch.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.planning.mesh.gpus import GPUS, find_gpu
from diloco.planning.mesh.roofline import StepWork, roofline_mfu, step_work
from inner.config import ExpertsConfig, ParallelConfig
from inner.flops import flops_per_token
from inner.measure.workload import Workload
from inner.mesh import Degrees
from inner.model.sizes import PRESETS, ModelSizes
from inner.optim.state_bytes import STATE_BYTES
from tests.parity.meshes import LATENT, MIXTURE

SIZES = ModelSizes(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=160, vocab_size=300)
ADAMW = STATE_BYTES["adamw"]


def workload(sizes: ModelSizes = SIZES, **given: Any) -> Workload:
    settings: dict[str, Any] = {"degrees": Degrees(), "parallel": ParallelConfig(), "seq_len": 128}
    settings |= {"micro_batch": 2, "num_micro_batches": 1, "compute_itemsize": 4} | given
    return Workload(sizes=sizes, **settings)


def kinds(work: Workload) -> dict[str, StepWork]:
    return {kind.name: kind for kind in step_work(work, ADAMW)}


@pytest.mark.parametrize(
    "sizes", [SIZES, MIXTURE, LATENT], ids=["dense", "experts", "latent attention"]
)
def test_operations_of_products_are_those_of_the_formula(sizes: ModelSizes) -> None:
    found = kinds(workload(sizes))
    flops = flops_per_token(sizes, 128)
    products = found["products of layers"].flops + found["head and loss"].flops
    assert products == pytest.approx(256 * flops.matmul)
    assert found["attention"].flops == pytest.approx(
        256 * (flops.attention + flops.recomputed + flops.padding) / 2
    )


class MatrixBytes(TorchDispatchMode):
    """Adds up the bytes that matrix products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.total += sum(each.numel() * each.element_size() for each in [*args, result])
        return result


def test_bytes_of_products_are_those_that_a_layer_of_this_shape_moves() -> None:
    work = workload()
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (160, 64), (160, 64), (64, 160)]
    with MatrixBytes() as counted:
        for rows, columns in shapes:
            inputs = torch.randn(work.tokens, columns, requires_grad=True)
            weight = torch.randn(rows, columns, requires_grad=True)
            torch.nn.functional.linear(inputs, weight).backward(torch.ones(work.tokens, rows))
    assert kinds(work)["products of layers"].num_bytes == SIZES.num_layers * counted.total


def test_a_product_of_experts_reads_every_expert_and_a_row_per_choice() -> None:
    experts = ExpertsConfig(number=6, per_token=2, dim=24)
    with_experts = replace(SIZES, experts=experts)
    without = kinds(workload(replace(SIZES, ffn_dim=8)))["products of layers"].num_bytes
    # Of a layer: gate, up and down of width 8 before; now six experts, two rows a token, and a
    # router.
    before = 3 * (256 * (64 + 8) + 64 * 8)
    now = 3 * (512 * (64 + 24) + 6 * 64 * 24) + 256 * (64 + 6) + 64 * 6
    found = kinds(workload(with_experts))["products of layers"].num_bytes
    assert found == without + SIZES.num_layers * 3 * 4 * (now - before)


def test_ranks_share_the_work_and_recomputation_adds_to_it() -> None:
    alone = kinds(workload())
    for degrees in (Degrees(tp=2), Degrees(pp=3)):
        shared = kinds(workload(degrees=degrees))
        parts = degrees.tp * degrees.pp
        assert shared["products of layers"].flops == pytest.approx(
            alone["products of layers"].flops / parts
        )
        assert shared["attention"].flops == pytest.approx(alone["attention"].flops / parts)
    assert kinds(workload(degrees=Degrees(cp=2)))["attention"].flops == pytest.approx(
        alone["attention"].flops / 2
    )
    assert "computed again" not in alone
    again = {
        each: kinds(workload(parallel=ParallelConfig(recompute=each)))
        for each in ("attention", "full")
    }
    assert 0 < again["attention"]["computed again"].flops < again["full"]["computed again"].flops
    assert (
        again["full"]["computed again"].flops
        < alone["products of layers"].flops / 3 + alone["attention"].flops
    )


def test_the_optimizer_reads_and_writes_each_parameter_of_its_shard() -> None:
    whole, shared = (
        kinds(workload(degrees=Degrees(dp_shard=n)))["optimizer"].num_bytes for n in (1, 4)
    )
    num_params = 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64 + 2 * 64) + 2 * 300 * 64 + 64
    assert whole == num_params * (4 + 4 + 4 + 16)
    assert shared == pytest.approx(whole / 4, rel=0.01)


def test_the_slower_of_computing_and_memory_bounds_a_kind_of_work() -> None:
    gpu = find_gpu("h100")
    ridge = gpu.flops / gpu.memory_rate
    assert StepWork("a", ridge * 1.01, 1.0).bound(gpu) == "computing"
    assert StepWork("a", ridge * 0.99, 1.0).bound(gpu) == "memory"
    assert StepWork("a", 0.0, gpu.memory_rate).seconds(gpu) == 1


@pytest.mark.parametrize("name", GPUS)
def test_a_step_without_recomputation_is_near_its_gpu_s_rate_at_best(name: str) -> None:
    work = workload(
        replace(PRESETS["8b"], num_layers=4), seq_len=4096, micro_batch=4, compute_itemsize=2
    )
    assert 0.6 < roofline_mfu(work, ADAMW, GPUS[name]) < 1.2
