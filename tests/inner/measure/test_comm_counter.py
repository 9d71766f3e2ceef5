import subprocess
import sys
import threading
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from inner.config import BalanceConfig, OptimizerConfig, ParallelConfig, PredictConfig
from inner.dry_run.comm_counter import CommCounter, island_groups
from inner.measure.traffic.expected import expected_traffic
from inner.measure.traffic.rows import SCALARS, TrafficRow, merge_axes
from inner.measure.workload import Workload
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes
from tests.harness import run_ranks
from tests.inner import small
from tests.parity.meshes import GEMMA, GPT2, LATENT, MIXTURE, NEOX

ROOT = Path(__file__).parents[3]

# Single operations


def _operations(rank: int) -> dict[str, list[TrafficRow]]:
    """Rows counted for each operation on 100 fp32 numbers; ranks 0 1 | 2 3 are the rows of a
    mesh.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("column", "row"))
    groups = {axis: mesh[axis].get_group() for axis in ("column", "row")}
    given, peer = torch.ones(100), (rank + 2) % 4
    group = groups["row"]

    def exchange() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, given, peer), dist.P2POp(dist.irecv, torch.empty(100), peer)]
        )
        for work in works:
            work.wait()

    def redistribute() -> None:
        sharded = distribute_tensor(
            torch.ones(8, 8), mesh, [Shard(0), Replicate()], src_data_rank=None
        )
        (sharded.t() @ sharded).redistribute(mesh, [Replicate(), Replicate()])

    compiled = torch.compile(
        lambda x: funcol.wait_tensor(funcol.all_reduce(2 * x, "sum", group)), backend="aot_eager"
    )
    calls = {
        "all_gather": lambda: dist.all_gather(
            [torch.empty(100) for _ in range(2)], given, group=group
        ),
        "all_gather_single": lambda: dist.all_gather_single(torch.empty(200), given, group=group),
        "all_reduce": lambda: dist.all_reduce(given.clone(), group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(torch.empty(50), given, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(100), given, group=group),
        "functional all_gather": lambda: funcol.wait_tensor(
            funcol.all_gather_single(given, 0, group)
        ),
        "broadcast": lambda: dist.broadcast(given, group_src=0, group=group),
        "send and receive": exchange,
        "DTensor": redistribute,
        "compiled": lambda: compiled(given),
        "few bytes": lambda: dist.all_reduce(torch.zeros(2), group=group),
        "alone": lambda: dist.all_reduce(
            given.clone(), group=dist.new_group([rank], use_local_synchronization=True)
        ),
        "barrier": lambda: dist.barrier(group),
    }
    rows = {}
    for name, call in calls.items():
        with CommCounter(groups) as ledger:
            call()
        rows[name] = ledger.rows
    with CommCounter({"one": group, "two": group}) as ledger:
        dist.all_reduce(given.clone(), group=group)
    return rows | {"two names": ledger.rows}


class _Deep(torch.autograd.Function):
    """Nested backwards: beyond 60 of them autograd continues in another thread, as it does for a
    CUDA device.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, group: Any, thread: int) -> torch.Tensor:
        ctx.rest = depth, group, thread
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        depth, group, thread = ctx.rest
        if depth:
            with torch.enable_grad():
                inner = _Deep.apply(
                    torch.ones(3, requires_grad=True), depth - 1, group, thread
                ).sum()
            inner.backward()
        else:
            assert threading.get_ident() != thread, "go deeper"
            dist.all_reduce(torch.ones(100), group=group)
        return grads[0], None, None, None


def deep_on_a_rank(rank: int) -> list[TrafficRow]:
    group = dist.group.WORLD
    total = _Deep.apply(torch.ones(3, requires_grad=True), 70, group, threading.get_ident()).sum()
    with CommCounter({"all": group}) as ledger:
        total.backward()
    return ledger.rows


@pytest.fixture(scope="module")
def operations() -> dict[str, list[TrafficRow]]:
    return run_ranks(_operations, 4)[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "all_gather": TrafficRow("row", "all_gather", 1, 400),
        "all_gather_single": TrafficRow("row", "all_gather", 1, 400),
        "all_reduce": TrafficRow("row", "all_reduce", 1, 400),
        "reduce_scatter": TrafficRow("row", "reduce_scatter", 1, 200),
        "all_to_all": TrafficRow("row", "all_to_all", 1, 200),
        "functional all_gather": TrafficRow("row", "all_gather", 1, 400),
        "broadcast": TrafficRow("row", "broadcast", 1, 200),
        "send and receive": TrafficRow("other", "send", 1, 400),
        "DTensor": TrafficRow("column", "all_reduce", 1, 256),
        "compiled": TrafficRow("row", "all_reduce", 1, 400),
        "few bytes": TrafficRow("row", "scalars", 1, 8),
        "two names": TrafficRow("one+two", "all_reduce", 1, 400),
    }.items(),
)
def test_an_operation_is_counted_once_with_what_it_sends(operations, name, expected):
    assert operations[name] == [expected]


@pytest.mark.parametrize("name", ["alone", "barrier"])
def test_what_sends_nothing_is_not_counted(operations, name):
    assert operations[name] == []


def test_a_collective_in_another_thread_of_autograd_is_counted():
    # A fresh interpreter, because autograd's threads do not survive a fork.
    code = (
        "from tests.harness import run_ranks; from tests.inner.measure.test_comm_counter import "
        "deep_on_a_rank; "
        "print(run_ranks(deep_on_a_rank, 2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert done.stdout.count("Row(axis='all', op='all_reduce', calls=1, sent_bytes=400)") == 2, (
        done.stderr
    )


# A step against the formula

SIZES = ModelSizes(
    dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61, qk_norm=True
)
TIED = replace(SIZES, tie_embeddings=True)
WIDE = replace(SIZES, dim=512, ffn_dim=1600, num_heads=8, num_kv_heads=4)
BIASED = replace(SIZES, qk_norm=False, qkv_bias=True, own_head_dim=12)
SEQ_LEN, MICRO_BATCH = 16, 3
CASES: dict[str, tuple[Degrees, ParallelConfig, ModelSizes, str, int]] = {
    "FSDP": (Degrees(dp_shard=2), ParallelConfig(), SIZES, "float32", 2),
    "FSDP, biases": (Degrees(dp_shard=2), ParallelConfig(), BIASED, "float32", 2),
    "tensor parallel, biases": (Degrees(tp=4), ParallelConfig(), BIASED, "float32", 1),
    "ring, wide heads": (Degrees(cp=2, tp=2), ParallelConfig(), BIASED, "float32", 1),
    "FSDP in bfloat16, tied": (Degrees(dp_shard=4), ParallelConfig(), TIED, "bfloat16", 1),
    "ZeRO-1": (Degrees(dp_shard=2), ParallelConfig(zero=1), SIZES, "bfloat16", 3),
    "FSDP, whole gradients": (
        Degrees(dp_shard=2),
        ParallelConfig(accumulate="whole"),
        SIZES,
        "bfloat16",
        3,
    ),
    "ZeRO-2": (Degrees(dp_shard=2), ParallelConfig(zero=2), SIZES, "float32", 2),
    "replicas": (Degrees(dp_replicate=2), ParallelConfig(), SIZES, "float32", 2),
    "replicas, FSDP": (Degrees(dp_replicate=2), ParallelConfig(zero=2), SIZES, "float32", 2),
    "replicas, many buckets": (
        Degrees(dp_replicate=2),
        ParallelConfig(zero=0),
        WIDE,
        "bfloat16",
        2,
    ),
    "replicas, ring, tied": (Degrees(dp_replicate=2, cp=2), ParallelConfig(), TIED, "float32", 1),
    "replicas, ring, Muon": (Degrees(dp_replicate=2, cp=2), ParallelConfig(), SIZES, "float32", 1),
    "replicas, tensor, Muon": (
        Degrees(dp_replicate=2, tp=2),
        ParallelConfig(),
        SIZES,
        "float32",
        1,
    ),
    "ring, FSDP": (Degrees(cp=2, tp=2), ParallelConfig(zero=3), SIZES, "bfloat16", 2),
    "zero bubble, replicas, tied": (
        Degrees(pp=2, dp_replicate=2),
        ParallelConfig(schedule="zbv"),
        TIED,
        "float32",
        4,
    ),
    "HSDP": (Degrees(dp_replicate=2, dp_shard=2), ParallelConfig(), SIZES, "float32", 2),
    "HSDP, whole gradients": (
        Degrees(dp_replicate=2, dp_shard=2),
        ParallelConfig(accumulate="whole"),
        SIZES,
        "float32",
        2,
    ),
    "tensor parallel": (Degrees(tp=2), ParallelConfig(), SIZES, "float32", 2),
    "tensor without sequence parallel": (
        Degrees(tp=2),
        ParallelConfig(sequence_parallel=False),
        SIZES,
        "float32",
        2,
    ),
    "tensor parallel, blocks repeated": (
        Degrees(tp=2),
        ParallelConfig(recompute="full"),
        SIZES,
        "float32",
        1,
    ),
    "more ranks than key-value heads": (Degrees(tp=4), ParallelConfig(), SIZES, "float32", 1),
    "loss in chunks": (Degrees(tp=2), ParallelConfig(loss_chunk=24), SIZES, "float32", 1),
    "FSDP and tensor": (Degrees(dp_shard=2, tp=2), ParallelConfig(), TIED, "bfloat16", 2),
    "FSDP and tensor, whole gradients": (
        Degrees(dp_shard=2, tp=2),
        ParallelConfig(accumulate="whole"),
        SIZES,
        "bfloat16",
        2,
    ),
    "1F1B": (Degrees(pp=2), ParallelConfig(), SIZES, "float32", 4),
    "1F1B, FSDP, tied": (Degrees(pp=2, dp_shard=2), ParallelConfig(), TIED, "float32", 4),
    "1F1B, HSDP": (
        Degrees(pp=2, dp_replicate=2, dp_shard=2),
        ParallelConfig(),
        SIZES,
        "float32",
        3,
    ),
    "1F1B, FSDP, whole gradients": (
        Degrees(pp=2, dp_shard=2),
        ParallelConfig(accumulate="whole"),
        SIZES,
        "bfloat16",
        4,
    ),
    "1F1B, ZeRO-3": (Degrees(pp=2, dp_shard=2), ParallelConfig(zero=3), SIZES, "float32", 4),
    "interleaved": (
        Degrees(pp=2, dp_shard=2),
        ParallelConfig(schedule="interleaved_1f1b", stages_per_rank=4),
        replace(SIZES, num_layers=8),
        "float32",
        4,
    ),
    "breadth first": (
        Degrees(pp=2, dp_shard=2),
        ParallelConfig(schedule="breadth_first", stages_per_rank=4),
        replace(SIZES, num_layers=8),
        "float32",
        4,
    ),
    "zero bubble, tied": (
        Degrees(pp=2, dp_shard=2),
        ParallelConfig(schedule="zbv"),
        TIED,
        "float32",
        4,
    ),
    "ring": (Degrees(cp=2, tp=2), ParallelConfig(), SIZES, "bfloat16", 2),
    "keys gathered": (
        Degrees(cp=2, tp=2),
        ParallelConfig(context="all_gather"),
        SIZES,
        "float32",
        1,
    ),
    "heads traded": (
        Degrees(cp=2, dp_shard=2),
        ParallelConfig(context="ulysses", recompute="selective"),
        SIZES,
        "float32",
        1,
    ),
    "1F1B and tensor": (Degrees(pp=2, tp=2), ParallelConfig(), SIZES, "float32", 2),
    "four dimensions": (Degrees(pp=2, cp=2, tp=2), ParallelConfig(), SIZES, "float32", 2),
}
WITH_SEQUENCE_LOSS = BalanceConfig(sequence_loss=0.1, router_z_loss=0.1)
LATENT_ALONE = replace(LATENT, experts=None)
CASES |= {
    "experts": (Degrees(dp_shard=2), ParallelConfig(), MIXTURE, "float32", 2),
    "experts, the router in fp32": (Degrees(dp_shard=4), ParallelConfig(), LATENT, "bfloat16", 2),
    "experts, the router in fp32, blocks repeated": (
        Degrees(dp_shard=2),
        ParallelConfig(recompute="full"),
        MIXTURE,
        "bfloat16",
        2,
    ),
    "experts, ZeRO-2": (Degrees(dp_shard=2), ParallelConfig(zero=2), MIXTURE, "bfloat16", 2),
    "experts, replicas": (Degrees(dp_replicate=2), ParallelConfig(), MIXTURE, "bfloat16", 2),
    "experts, HSDP": (
        Degrees(dp_replicate=2, dp_shard=2),
        ParallelConfig(),
        MIXTURE,
        "bfloat16",
        2,
    ),
    "experts, ring, loads of sequences": (
        Degrees(cp=2, dp_shard=2),
        ParallelConfig(recompute="full"),
        MIXTURE,
        "float32",
        2,
    ),
    "experts, heads traded": (
        Degrees(cp=2, dp_shard=2),
        ParallelConfig(context="ulysses"),
        LATENT,
        "bfloat16",
        1,
    ),
    "experts, 1F1B": (Degrees(pp=2), ParallelConfig(), MIXTURE, "float32", 4),
    "experts, 1F1B, ZeRO-3": (
        Degrees(pp=2, dp_shard=2),
        ParallelConfig(zero=3),
        MIXTURE,
        "bfloat16",
        4,
    ),
    "experts, zero bubble": (
        Degrees(pp=2, dp_shard=2),
        ParallelConfig(schedule="zbv"),
        LATENT,
        "bfloat16",
        4,
    ),
    "experts, Muon": (Degrees(dp_shard=4), ParallelConfig(), MIXTURE, "bfloat16", 2),
    "experts, HSDP, Muon": (
        Degrees(dp_replicate=2, dp_shard=2),
        ParallelConfig(),
        LATENT,
        "float32",
        1,
    ),
    "latent attention, tensor parallel": (
        Degrees(tp=2),
        ParallelConfig(),
        LATENT_ALONE,
        "float32",
        2,
    ),
    "latent attention, tensor without sequence parallel": (
        Degrees(tp=2),
        ParallelConfig(sequence_parallel=False),
        LATENT_ALONE,
        "float32",
        2,
    ),
    "latent attention, ring and tensor": (
        Degrees(cp=2, tp=2),
        ParallelConfig(),
        LATENT_ALONE,
        "bfloat16",
        2,
    ),
    "latent attention, tensor, Muon": (
        Degrees(dp_shard=2, tp=2),
        ParallelConfig(),
        LATENT_ALONE,
        "float32",
        2,
    ),
}
NO_SPLIT = ParallelConfig(sequence_parallel=False, recompute="full")
FAMILIES: dict[str, tuple[Degrees, ParallelConfig, ModelSizes, str, int]] = {
    "normed outputs, tensor parallel": (
        Degrees(tp=2),
        ParallelConfig(recompute="full"),
        GEMMA,
        "float32",
        1,
    ),
    "normed outputs, tensor without sequence parallel": (
        Degrees(tp=2),
        NO_SPLIT,
        GEMMA,
        "float32",
        1,
    ),
    "windows, ring": (Degrees(cp=2), ParallelConfig(), GEMMA, "float32", 2),
    "learned positions, FSDP": (Degrees(dp_shard=2), ParallelConfig(), GPT2, "bfloat16", 2),
    "learned positions, replicas": (Degrees(dp_replicate=2), ParallelConfig(), GPT2, "float32", 2),
    "learned positions, tensor parallel": (Degrees(tp=2), ParallelConfig(), GPT2, "float32", 2),
    "biases of outputs, tensor without sequence parallel": (
        Degrees(tp=2),
        NO_SPLIT,
        GPT2,
        "float32",
        1,
    ),
    "parallel blocks, tensor parallel": (
        Degrees(tp=2),
        ParallelConfig(recompute="full"),
        NEOX,
        "float32",
        1,
    ),
}
CASES |= FAMILIES
DEPTHS = replace(SIZES, predict=PredictConfig(depths=2))
CASES |= {
    "extra depths": (Degrees(dp_shard=2), ParallelConfig(), DEPTHS, "float32", 2),
    "extra depths, tensor parallel": (Degrees(tp=2), ParallelConfig(), DEPTHS, "float32", 2),
    "extra depths, tensor without sequence parallel, blocks repeated": (
        Degrees(tp=2),
        ParallelConfig(sequence_parallel=False, recompute="full"),
        DEPTHS,
        "float32",
        1,
    ),
    "extra depths, tensor parallel, blocks repeated": (
        Degrees(tp=2),
        ParallelConfig(recompute="full"),
        replace(DEPTHS, tie_embeddings=True),
        "bfloat16",
        1,
    ),
    "extra depths, ring": (Degrees(cp=2, tp=2), ParallelConfig(), DEPTHS, "float32", 2),
    "extra depths, 1F1B": (Degrees(pp=2), ParallelConfig(), DEPTHS, "float32", 4),
    "extra depths, Muon": (Degrees(dp_shard=2), ParallelConfig(), DEPTHS, "float32", 1),
    "extra depths of experts, the router in fp32": (
        Degrees(dp_shard=2),
        ParallelConfig(),
        replace(MIXTURE, predict=PredictConfig(depths=1)),
        "bfloat16",
        2,
    ),
    "extra depths, zero bubble": (
        Degrees(pp=2, dp_shard=2),
        ParallelConfig(schedule="zbv"),
        DEPTHS,
        "float32",
        4,
    ),
}
SLOW = [
    *FAMILIES,
    "extra depths, tensor parallel, blocks repeated",
    "extra depths, ring",
    "extra depths, zero bubble",
    "extra depths of experts, the router in fp32",
    "four dimensions",
    "experts",
    "experts, ZeRO-2",
    "experts, replicas",
    "replicas, FSDP",
    "replicas, tensor, Muon",
    "ring, FSDP",
    "experts, HSDP",
    "experts, 1F1B",
    "experts, HSDP, Muon",
    "latent attention, tensor without sequence parallel",
    "latent attention, ring and tensor",
    "1F1B, HSDP",
    "HSDP, whole gradients",
    "FSDP and tensor, whole gradients",
    "FSDP, biases",
    "tensor parallel, biases",
    "1F1B, FSDP, whole gradients",
    "1F1B and tensor",
    "breadth first",
]
"""What each of them has is in other cases, too."""


def _step(
    rank: int, cases: dict[str, Any]
) -> dict[str, tuple[int, list[TrafficRow], list[TrafficRow]]]:
    """By case: the rank's coordinate on pp, the rows counted in its second step, and the expected
    rows.
    """
    return {name: _traffic(name, *case) for name, case in cases.items()}


def _traffic(
    name: str,
    degrees: Degrees,
    parallel: ParallelConfig,
    sizes: ModelSizes,
    dtype: str,
    num_micro_batches: int,
) -> tuple[int, list[TrafficRow], list[TrafficRow]]:
    tokens = num_micro_batches * MICRO_BATCH * SEQ_LEN * degrees.num_data_ranks
    balance = WITH_SEQUENCE_LOSS if name.endswith("loads of sequences") else BalanceConfig()
    optimizer = "muon" if name.endswith("Muon") else "adamw"
    trainer = small.build_trainer(
        degrees,
        sizes,
        OptimizerConfig(name=optimizer, tokens_per_step=tokens, balance=balance),
        parallel,
        compute_dtype=dtype,
        micro_batch=MICRO_BATCH,
        seq_len=SEQ_LEN,
    )
    windows = list(torch.zeros(num_micro_batches, MICRO_BATCH, SEQ_LEN + 1, dtype=torch.int64))
    trainer.step(windows)
    with CommCounter(island_groups(trainer.mesh)) as ledger:
        trainer.step(windows)
    work = Workload(
        sizes=sizes,
        degrees=degrees,
        parallel=parallel,
        seq_len=SEQ_LEN,
        micro_batch=MICRO_BATCH,
        num_micro_batches=num_micro_batches,
        compute_itemsize=2 if dtype == "bfloat16" else 4,
        deals_matrices=optimizer == "muon",
        balance=balance,
    )
    pp_rank = trainer.mesh.at["pp"]
    return (
        pp_rank,
        [row for row in ledger.rows if row.op != SCALARS],
        expected_traffic(work, pp_rank),
    )


@pytest.fixture(scope="module")
def traffic(
    request: pytest.FixtureRequest,
) -> dict[str, list[tuple[int, list[TrafficRow], list[TrafficRow]]]]:
    """Results of each rank, for the cases that the selected tests use."""
    wanted = {
        getattr(item, "callspec", None) and item.callspec.params.get("name")
        for item in request.session.items
    }
    results: dict[str, list[Any]] = {}
    for num_ranks in (2, 4, 8):
        cases = {
            name: case
            for name, case in CASES.items()
            if name in wanted and case[0].num_ranks == num_ranks
        }
        if not cases:
            continue
        for by_case in run_ranks(_step, num_ranks, cases, timeout_seconds=600):
            for name, result in by_case.items():
                results.setdefault(name, []).append(result)
    return results


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_a_step_sends_exactly_what_the_formula_says(traffic, name):
    degrees = CASES[name][0]
    ranks = [result for rank, result in enumerate(traffic[name]) if _is_fullest(degrees, rank)]
    assert len(ranks) == degrees.pp
    for _, counted, expected in ranks:
        # One group of ranks may belong to several axes, and the counter cannot tell them apart.
        assert merge_axes(counted, degrees) == merge_axes(expected, degrees)
        assert prod(row.sent_bytes for row in counted) > 0


def _is_fullest(degrees: Degrees, rank: int) -> bool:
    """Whether the rank has coordinate 0 on all axes but pp, and so the larger shard where rows do
    not divide.
    """
    return not any(place for axis, place in degrees.coordinates(rank).items() if axis != "pp")
