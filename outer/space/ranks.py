"""The ranks of one island, speaking to one another about the outer loop.

Uses a CPU (gloo) group of the island, never the groups that the inner trainer computes with.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Team:
    """All methods are collective: every rank of the island calls them in the same order.

    `group` is None in an island of one rank. Objects travel by pickle: ranks of one island trust one another.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, background: dist.ProcessGroup | None = None) -> None:
        """`background`: a second group of the same ranks, for calls while another thread uses the first."""
        self._group, self._background = group, background
        self.rank = dist.get_rank(group) if group else 0
        self.num_ranks = dist.get_world_size(group) if group else 1

    @property
    def background(self) -> "Team":
        """The same ranks, for calls from another thread."""
        return self if self._background is None else Team(self._background)

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for the island."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """The leader's value, on every rank."""
        if self._group is None:
            return value
        box = [value if self.is_leader else None]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def on_leader(self, work: Callable[[], T]) -> T:
        """The leader's result of `work`, on every rank."""
        return self.broadcast(work() if self.is_leader else None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy `outgoing[r]` (fp32 CPU views) into rank r's `incoming[me]`, in list order.

        The views on both sides have equal sizes; which rank lists what is agreed beforehand.
        """
        for source, target in zip(outgoing[self.rank], incoming[self.rank], strict=True):
            target.copy_(source)
        if self._group is None:
            return
        sends = [[] if r == self.rank else v for r, v in enumerate(outgoing)]
        receives = [[] if r == self.rank else v for r, v in enumerate(incoming)]
        packed = torch.cat([torch.empty(0), *(view.reshape(-1) for views in sends for view in views)])
        # Not all_to_all of lists: gloo's takes tensors of one size only.
        sizes_in, sizes_out = ([sum(v.numel() for v in views) for views in side] for side in (receives, sends))
        received = torch.empty(sum(sizes_in))
        dist.all_to_all_single(received, packed, sizes_in, sizes_out, group=self._group)
        _unpack(received, [view for views in receives for view in views])


def _unpack(flat: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    start = 0
    for view in views:
        view.copy_(flat[start : start + view.numel()].view(view.shape))
        start += view.numel()
