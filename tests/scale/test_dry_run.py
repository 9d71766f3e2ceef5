"""Inner steps at real sizes on a device that computes nothing: memory, traffic, and crossings
between host and device.

Each case is one rank in a process of its own. The default suite runs small ones; all: scripts/test
tests/scale -m ""
"""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from diloco.errors import ConfigError
from diloco.planning.mesh.dry_run import rehearse_apart
from inner.config import OptimizerConfig, ParallelConfig
from inner.config.experts import ROUTER_SUMS
from inner.dry_run.case import Rehearsal, RehearsalResult
from inner.measure.memory import estimate_memory
from inner.measure.traffic.expected import expected_traffic
from inner.measure.traffic.rows import SCALARS, merge_axes
from inner.measure.workload import Workload
from inner.mesh import Degrees
from inner.model.sizes import PRESETS

SPREAD = 0.05
"""Largest share by which a peak may differ from its estimate."""
NUM_READS = 3
"""Numbers that the host reads from the device in a step, at once: loss, norm and tokens."""


@dataclass(frozen=True)
class Case:
    preset: str
    degrees: Degrees
    num_layers: int = 0
    """0: all of the preset's."""
    seq_len: int = 2048
    num_micro_batches: int = 2
    rank: int = 0
    optimizer: str = "adamw"
    parallel: dict[str, Any] = field(default_factory=dict)
    masks_documents: bool = False
    dtype: str = "bfloat16"
    all_rows_arrive: bool = False

    @property
    def work(self) -> Workload:
        return self.rehearsal.work

    @property
    def rehearsal(self) -> Rehearsal:
        sizes = PRESETS[self.preset]
        tokens = self.num_micro_batches * self.seq_len * self.degrees.num_data_ranks
        return Rehearsal(
            sizes=replace(sizes, num_layers=self.num_layers) if self.num_layers else sizes,
            degrees=self.degrees,
            parallel=ParallelConfig.model_validate(self.parallel),
            optimizer=OptimizerConfig.model_validate(
                {"name": self.optimizer, "tokens_per_step": tokens}
            ),
            seq_len=self.seq_len,
            micro_batch=1,
            compute_dtype=self.dtype,
            eos_id=0 if self.masks_documents else None,
            rank=self.rank,
            all_rows_arrive=self.all_rows_arrive,
        )


CASES = {
    "1b, 2 layers on 8": Case("1b", Degrees(dp_shard=8), num_layers=2),
    "8b, 2 layers, context of 4": Case(
        "8b", Degrees(dp_shard=2, cp=4), num_layers=2, parallel={"context": "ulysses"}
    ),
    "8b, 2 layers, documents, 4 chunks of the loss": Case(
        "8b",
        Degrees(dp_shard=8),
        num_layers=2,
        seq_len=16384,
        num_micro_batches=1,
        masks_documents=True,
    ),
    "1b, 2 layers, one process": Case("1b", Degrees(), num_layers=2),
    "8b, 2 layers, tensor parallel": Case("8b", Degrees(tp=8), num_layers=2, rank=3),
    "8b, 8 layers on 128, the last rank": Case(
        "8b", Degrees(pp=4, dp_shard=2, cp=2, tp=8), num_layers=8, num_micro_batches=4, rank=127
    ),
    "1b, 2 layers, Muon": Case(
        "1b", Degrees(dp_replicate=2, dp_shard=2, tp=2), num_layers=2, rank=5, optimizer="muon"
    ),
    "experts, 2 layers on 64": Case("qwen3-30b-a3b", Degrees(dp_shard=64), num_layers=2),
    "experts, 2 layers on 8, float32": Case(
        "7b-a1b", Degrees(dp_shard=8), num_layers=2, dtype="float32"
    ),
    "experts, 2 layers on 64, ep": Case(
        "qwen3-30b-a3b", Degrees(dp_shard=64, ep=8), num_layers=2, rank=9
    ),
    "experts, 2 layers, tp and ep, float32": Case(
        "qwen3-30b-a3b", Degrees(dp_shard=4, tp=2, ep=4), num_layers=2, dtype="float32"
    ),
    "1b, 2 layers, the tied table in two stages": Case(
        "1b", Degrees(pp=2, tp=2), num_layers=2, rank=3
    ),
}
SLOW = {
    "experts, 4 layers in 2 stages, Muon": Case(
        "qwen3-30b-a3b",
        Degrees(pp=2, dp_shard=8),
        num_layers=4,
        num_micro_batches=4,
        rank=15,
        optimizer="muon",
    ),
    "experts, 30b on 64": Case(
        "qwen3-30b-a3b", Degrees(dp_shard=64), seq_len=4096, num_micro_batches=1
    ),
    "experts, 30b on 64, ep": Case(
        "qwen3-30b-a3b", Degrees(dp_shard=64, ep=8), seq_len=4096, num_micro_batches=1
    ),
    "experts, 2 layers on 64, all rows arrive": Case(
        "qwen3-30b-a3b", Degrees(dp_shard=64, ep=8), num_layers=2, all_rows_arrive=True
    ),
    "experts, 2 layers on 256, rows of experts cut, Muon": Case(
        "qwen3-30b-a3b", Degrees(dp_shard=256, ep=8), num_layers=2, optimizer="muon"
    ),
    "experts, 4 layers, tp and ep, whole stream, recomputed": Case(
        "qwen3-30b-a3b",
        Degrees(dp_shard=4, tp=2, ep=4),
        num_layers=4,
        parallel={"sequence_parallel": False, "recompute": "full"},
    ),
    **{
        f"experts, deepseek-v3 on 512, rank {rank}": Case(
            "deepseek-v3",
            Degrees(pp=8, dp_shard=64, ep=64),
            seq_len=4096,
            num_micro_batches=8,
            rank=rank,
            parallel={"recompute": "full"},
        )
        for rank in (0, 511)
    },
    "experts, latent attention, 5 layers on 64": Case(
        "deepseek-v3",
        Degrees(dp_shard=64),
        num_layers=5,
        num_micro_batches=1,
        parallel={"recompute": "full"},
    ),
    "1b on 8": Case("1b", Degrees(dp_shard=8)),
    "1b, 4 layers, Muon": Case(
        "1b", Degrees(dp_replicate=2, dp_shard=2, tp=2), num_layers=4, rank=5, optimizer="muon"
    ),
    "8b, 4 layers, context of 4": Case(
        "8b", Degrees(dp_shard=2, cp=4), num_layers=4, parallel={"context": "ulysses"}
    ),
    "8b on 8": Case("8b", Degrees(dp_shard=8), seq_len=8192, num_micro_batches=1),
    "8b on 8, 4 micro-batches": Case(
        "8b", Degrees(dp_shard=8), seq_len=8192, num_micro_batches=4, parallel={"recompute": "full"}
    ),
    "8b on 8, 4 micro-batches, nothing recomputed": Case(
        "8b", Degrees(dp_shard=8), seq_len=8192, num_micro_batches=4
    ),
    "8b, 8 layers, 1f1b, the last rank": Case(
        "8b", Degrees(pp=4, dp_shard=2), num_layers=8, num_micro_batches=4, rank=7
    ),
    "8b, 8 layers, zbv, the last rank": Case(
        "8b",
        Degrees(pp=4, dp_shard=2),
        num_layers=8,
        num_micro_batches=4,
        rank=7,
        parallel={"schedule": "zbv"},
    ),
    "8b, 8 layers, whole gradients": Case(
        "8b",
        Degrees(pp=4, dp_shard=2),
        num_layers=8,
        num_micro_batches=4,
        rank=4,
        parallel={"accumulate": "whole"},
    ),
    "8b, 4 layers, tensor parallel, recomputed": Case(
        "8b", Degrees(dp_shard=8, tp=8), num_layers=4, parallel={"recompute": "selective"}
    ),
    "8b, 4 layers, ring, documents": Case(
        "8b", Degrees(dp_shard=2, cp=4), num_layers=4, masks_documents=True
    ),
    "8b on 64": Case(
        "8b",
        Degrees(dp_shard=64),
        seq_len=8192,
        num_micro_batches=1,
        rank=63,
        parallel={"recompute": "selective"},
    ),
    "8b, 4 layers, ZeRO-2": Case("8b", Degrees(dp_shard=8), num_layers=4, parallel={"zero": 2}),
    "8b, 4 layers, keys gathered": Case(
        "8b", Degrees(dp_shard=2, cp=4), num_layers=4, parallel={"context": "all_gather"}
    ),
    "8b, 4 layers, Muon": Case("8b", Degrees(dp_shard=8), num_layers=4, optimizer="muon"),
    "8b, 4 layers in 2 stages, Muon": Case(
        "8b", Degrees(pp=2, dp_shard=2, cp=2), num_layers=4, rank=7, optimizer="muon"
    ),
    "8b, 6 layers, more ranks than key-value heads, Muon": Case(
        "8b", Degrees(dp_shard=2, tp=16), num_layers=6, seq_len=8192, rank=31, optimizer="muon"
    ),
    "8b, 4 layers, ring": Case("8b", Degrees(dp_shard=2, cp=4), num_layers=4, rank=7),
    **{
        f"70b on 512, rank {rank}": Case(
            "70b", Degrees(pp=4, dp_shard=16, tp=8), seq_len=8192, num_micro_batches=8, rank=rank
        )
        for rank in (0, 255, 511)
    },
    **{
        f"405b on 1024, rank {rank}": Case(
            "405b",
            Degrees(pp=8, dp_shard=16, tp=8),
            seq_len=8192,
            num_micro_batches=8,
            rank=rank,
            parallel={"recompute": "full"},
        )
        for rank in (0, 511, 1023)
    },
}


@cache
def rehearsed(name: str) -> RehearsalResult:
    return rehearse_apart((CASES | SLOW)[name].rehearsal)


each_case = pytest.mark.parametrize(
    "name",
    [
        *CASES,
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]) for name in SLOW),
    ],
)


@each_case
def test_a_rank_sends_exactly_what_the_formula_says(name: str) -> None:
    done = rehearsed(name)
    work = (CASES | SLOW)[name].work
    sent = [row for row in done.traffic if row.op != SCALARS]
    expected = expected_traffic(work, done.coordinates["pp"])
    assert merge_axes(sent, work.degrees) == merge_axes(expected, work.degrees)


@each_case
def test_the_peak_is_near_the_estimate(name: str) -> None:
    case, done = (CASES | SLOW)[name], rehearsed(name)
    expected = estimate_memory(case.work, case.optimizer, "cuda")[done.coordinates["pp"]].peak
    assert done.peak_bytes == pytest.approx(expected, rel=SPREAD)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", ["8b on 8, 4 micro-batches", "8b on 8, 4 micro-batches, nothing recomputed"]
)
def test_8b_with_4_micro_batches_fits_into_8_gpus_of_80_gb(name: str) -> None:
    case = SLOW[name]
    assert estimate_memory(case.work, case.optimizer, "cuda")[0].peak < 80e9
    assert rehearsed(name).peak_bytes < 80e9


@each_case
def test_the_host_waits_for_the_device_once(name: str) -> None:
    reads = [
        times
        for what, times in rehearsed(name).crossings.items()
        if what.startswith("read by the host")
    ]
    sizes = (CASES | SLOW)[name].work.sizes
    # Of a mixture also what its routers did: a list of numbers by layer.
    routing = (
        []
        if sizes.experts is None
        else [len(sizes.expert_layers) * (sizes.experts.number + ROUTER_SUMS)]
    )
    assert sorted(reads) == sorted([NUM_READS, *routing])


@each_case
def test_the_host_sends_only_the_text_and_reads_the_numbers_of_rows(name: str) -> None:
    others = {
        what: n
        for what, n in rehearsed(name).crossings.items()
        if not what.startswith("read by the host")
    }
    case = (CASES | SLOW)[name]
    # The micro-batches, and where their documents begin.
    most = case.num_micro_batches * (1 + case.masks_documents)
    # Of a mixture also the change of each router's bias, and with ep the numbers of rows that
    # travel.
    reads_rows = case.num_micro_batches * (case.degrees.ep > 1)
    most += len(case.work.sizes.expert_layers) * (1 + reads_rows)
    assert sum(others.values()) <= most, json.dumps(others, indent=1)


@each_case
def test_everything_is_sent_from_the_device(name: str) -> None:
    assert not rehearsed(name).misplaced


def test_a_mesh_that_does_not_fit_is_refused_with_its_cause() -> None:
    case = Case("1b", Degrees(tp=3), num_layers=1).rehearsal
    with pytest.raises(ConfigError, match=r"the rehearsal of rank 0 failed: .*tp"):
        rehearse_apart(case)
