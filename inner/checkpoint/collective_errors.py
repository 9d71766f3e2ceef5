"""Work that ranks do on their own and whose outcome, good or bad, is the same on all of them."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def together(group: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """What `work` returned on each rank, in rank order; if it raised anywhere, every rank raises the first such.

    Every rank of the group must call it. Results and errors are pickled, between the ranks of one island only.
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
    return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType] - None only beside an error


def on_first(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """What `work` returned on rank 0, the only one that does it; or what it raised. Every rank must call it."""
    is_first = dist.get_rank(group) == 0
    return together(group, lambda: work() if is_first else None)[0]  # pyright: ignore[reportReturnType] - rank 0's
