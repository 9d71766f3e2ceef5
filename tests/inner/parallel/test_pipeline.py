"""Traffic of FSDP under pipeline schedules, and wrong micro-batches; parity is tested in
tests/parity.
"""

from dataclasses import replace

import pytest
import torch

from inner.config import ParallelConfig
from inner.dry_run.comm_counter import CommCounter, island_groups
from inner.mesh import Degrees
from tests.harness import RankFailed, run_ranks
from tests.inner.small import OPTIMIZER, SEQ_LEN, SIZES, batch, build_trainer

MICRO_BATCHES = 8
DEEP = replace(SIZES, num_layers=8, ffn_dim=48)
CONFIG = OPTIMIZER.model_copy(update={"tokens_per_step": 2 * MICRO_BATCHES * SEQ_LEN})
MESH = Degrees(pp=2, dp_shard=2)


def calls_on_a_rank(rank: int, schedule: str) -> dict[str, int]:
    """Calls of FSDP by operation, with four stages per rank, in the second step; the first one sets
    things up.
    """
    parallel = ParallelConfig(schedule=schedule, stages_per_rank=4)
    trainer = build_trainer(MESH, DEEP, CONFIG, parallel, micro_batch=1)
    windows = list(batch(0)[:MICRO_BATCHES].split(1))
    trainer.step(windows)
    with CommCounter(island_groups(trainer.mesh)) as ledger:
        trainer.step(windows)
    return {row.op: row.calls for row in ledger.rows if row.axis == "fsdp"}


@pytest.fixture(scope="module")
def breadth_first() -> list[dict[str, int]]:
    return run_ranks(calls_on_a_rank, 4, "breadth_first")


def test_breadth_first_gathers_weights_less_than_half_as_often_as_interleaved(
    breadth_first: list[dict[str, int]],
) -> None:
    interleaved = run_ranks(calls_on_a_rank, 4, "interleaved_1f1b")
    for mine, theirs in zip(breadth_first, interleaved, strict=True):
        assert 0 < mine["all_gather"] < theirs["all_gather"] / 2


def test_gradients_cross_the_mesh_in_each_micro_batch(breadth_first: list[dict[str, int]]) -> None:
    # Eight stages have one layer each, the first one also the embedding, and the last one the head.
    for rank, calls in enumerate(breadth_first):
        assert calls["reduce_scatter"] == 5 * MICRO_BATCHES, rank


def other_shape_on_a_rank(rank: int) -> None:
    trainer = build_trainer(Degrees(pp=2), micro_batch=3)
    trainer.step([torch.zeros(2, SEQ_LEN + 1, dtype=torch.int64)] * trainer.micro_batches_per_step)


def test_a_micro_batch_of_another_shape_is_refused_before_anyone_waits() -> None:
    with pytest.raises(RankFailed, match=r"built for micro-batches of \(3, 16\), got \(2, 16\)"):
        run_ranks(other_shape_on_a_rank, 2)
