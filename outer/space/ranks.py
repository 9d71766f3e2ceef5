"""Collectives among the ranks of one island, for the outer loop.

They use a CPU (gloo) process group of their own, never the process groups that the inner trainer
computes with.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class RankGroup:
    """The ranks of an island as a process group. Every method is collective: all ranks call it in
    the same order.

    Objects are sent as pickles, because the ranks of one island trust each other.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, background: dist.ProcessGroup | None = None
    ) -> None:
        """Wrap the groups. `group` is None on an island of one rank; `background` is a second
        group, for calls from another thread.
        """
        self._group = group
        self._background = background
        self.rank = dist.get_rank(group) if group else 0
        self.num_ranks = dist.get_world_size(group) if group else 1

    @property
    def background(self) -> "RankGroup":
        """The same ranks, for calls from another thread."""
        return self if self._background is None else RankGroup(self._background)

    @property
    def is_leader(self) -> bool:
        """Whether this rank communicates for the island."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return the leader's value, on every rank."""
        if self._group is None:
            return value
        box = [value if self.is_leader else None]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def on_leader(self, work: Callable[[], T]) -> T:
        """Run `work` on the leader and return its result on every rank."""
        return self.broadcast(work() if self.is_leader else None)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(
        self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Copy `outgoing[r]` (fp32 CPU views) into rank r's `incoming[me]`, in list order.

        Both ranks must list views of equal sizes in the same order.
        """
        for source, target in zip(outgoing[self.rank], incoming[self.rank], strict=True):
            target.copy_(source)
        if self._group is None:
            return
        sends = [[] if r == self.rank else v for r, v in enumerate(outgoing)]
        receives = [[] if r == self.rank else v for r, v in enumerate(incoming)]
        packed = torch.cat(
            [torch.empty(0), *(view.reshape(-1) for views in sends for view in views)]
        )
        # Gloo's all_to_all of tensor lists requires equal sizes, so each rank sends one flat tensor
        # with split sizes.
        sizes_in, sizes_out = (
            [sum(v.numel() for v in views) for views in side] for side in (receives, sends)
        )
        received = torch.empty(sum(sizes_in))
        dist.all_to_all_single(received, packed, sizes_in, sizes_out, group=self._group)
        _unpack(received, [view for views in receives for view in views])


def _unpack(flat: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    start = 0
    for view in views:
        view.copy_(flat[start : start + view.numel()].view(view.shape))
        start += view.numel()
