"""What a pipeline's schedule costs FSDP, and micro-batches it was not built for; parity is in tests/parity."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inner.config import ParallelConfig
from inner.mesh import Degrees
from tests.harness import RankFailed, run_ranks
from tests.inner.small import OPTIMIZER, SEQ_LEN, SIZES, batch, build_trainer

MICRO_BATCHES = 8
DEEP = replace(SIZES, num_layers=8, ffn_dim=48)
CONFIG = OPTIMIZER.model_copy(update={"tokens_per_step": 2 * MICRO_BATCHES * SEQ_LEN})
MESH = Degrees(pp=2, dp_shard=2)


class Calls(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += "c10d" in str(func)
        return func(*args, **(kwargs or {}))


def calls_on_a_rank(rank: int, schedule: str) -> Counter[str]:
    """Of the second step with four stages a rank; the first one builds things."""
    parallel = ParallelConfig(schedule=schedule, stages_per_rank=4)
    trainer = build_trainer(MESH, DEEP, CONFIG, parallel, micro_batch=1)
    windows = list(batch(0)[:MICRO_BATCHES].split(1))
    trainer.step(windows)
    with Calls() as calls:
        trainer.step(windows)
    return calls.counts


def gathers(calls: Counter[str]) -> int:
    return sum(count for name, count in calls.items() if "allgather" in name)


@pytest.fixture(scope="module")
def breadth_first() -> list[Counter[str]]:
    return run_ranks(calls_on_a_rank, 4, "breadth_first")


def test_breadth_first_gathers_weights_less_than_half_as_often_as_interleaved(
    breadth_first: list[Counter[str]],
) -> None:
    interleaved = run_ranks(calls_on_a_rank, 4, "interleaved_1f1b")
    for mine, theirs in zip(breadth_first, interleaved, strict=True):
        assert 0 < gathers(mine) < gathers(theirs) / 2


def test_gradients_cross_the_mesh_once_however_many_micro_batches(breadth_first: list[Counter[str]]) -> None:
    # Eight stages of one layer; the roots of the first and the last have parameters of their own, too.
    for rank, calls in enumerate(breadth_first):
        assert sum(count for name, count in calls.items() if "reduce_scatter" in name) == 5, rank


def other_shape_on_a_rank(rank: int) -> None:
    trainer = build_trainer(Degrees(pp=2), micro_batch=3)
    trainer.step([torch.zeros(2, SEQ_LEN + 1, dtype=torch.int64)] * trainer.micro_batches_per_step)


def test_a_micro_batch_of_another_shape_is_refused_before_anyone_waits() -> None:
    with pytest.raises(RankFailed, match=r"built for micro-batches of \(3, 16\), got \(2, 16\)"):
        run_ranks(other_shape_on_a_rank, 2)
