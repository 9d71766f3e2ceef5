"""The fork harness: results by rank, and failures that do not hang."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailed, run_ranks


def summed(rank: int, base: int) -> tuple[int, float]:
    total = torch.tensor(float(base + rank))
    dist.all_reduce(total)
    return rank, total.item()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(summed, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_a_raising_rank_is_told_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 raised:(.|\n)*rank one is unwell"):
        run_ranks(fail_on_one, 2)


def test_a_dying_rank_is_told() -> None:
    with pytest.raises(RankFailed, match="rank 0 died"):
        run_ranks(lambda rank: os._exit(3), 1)


def test_a_hanging_rank_is_ended_at_the_deadline() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0\] did not finish"):
        run_ranks(lambda rank: threading.Event().wait(60), 1, timeout_seconds=2)
