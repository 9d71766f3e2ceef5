"""Run a function on the ranks of a group so that all of them succeed, or all raise the same
error.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def run_on_all_ranks(group: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return all results in rank order. Every rank of the group must
    call it.

    If `work` raises on some ranks, every rank raises the error of the lowest of them. Results and
    errors are pickled, but travel only between the ranks of one island.
    """
    mine: tuple[T | None, Exception | None]
    try:
        mine = work(), None
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        mine = None, error
    outcomes = [mine] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, mine, group=group)
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            error.add_note(f"on rank {rank}")
            raise error
    return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType] - None only with an error


def run_on_first_rank(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only; return its result, or raise its error, on every rank. Every rank
    must call it.
    """
    is_first = dist.get_rank(group) == 0
    return run_on_all_ranks(group, lambda: work() if is_first else None)[0]  # pyright: ignore[reportReturnType] - from rank 0
