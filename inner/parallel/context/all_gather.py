"""Attention to gathered keys, as in Llama 3 (2407.21783, 3.3.2): every rank of cp has all of them for a while.

The ring's order of positions and its bytes, but one message instead of w - 1, and three blocks of scores instead of w;
for that, each attention needs room for the whole sequence's keys and values while it runs.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from inner.parallel.blocks import Keys, Step
from inner.parallel.zigzag import join, spread

POSITIONS = 2
"""Dim of kv_2BSKE."""


class AllGather:
    """An Exchange: all keys are under way while the rank's own are used."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def steps(self, keys: Keys) -> Iterator[Step]:
        gathered, works = _gather([tensor for tensor in keys if tensor is not None], self._group)
        everything = slice(None)
        yield Step(everything, keys, everything, is_own=True)
        for work in works:
            work.wait()
        kv, *documents = gathered
        documents_BT = join(documents[0].movedim(0, 1), 1) if documents else None
        sequence = Keys(join(kv.movedim(0, POSITIONS), POSITIONS), documents_BT)
        rank, chunk, seq_len = self._group.rank(), kv.shape[1 + POSITIONS] // 2, sequence.kv_2BTKE.shape[POSITIONS]
        before_both, between = slice(0, rank * chunk), slice((rank + 1) * chunk, seq_len - (rank + 1) * chunk)
        if before_both.start < before_both.stop:
            yield Step(everything, sequence, before_both, is_own=False)
        if between.start < between.stop:
            yield Step(slice(chunk, None), sequence, between, is_own=False)

    def gradients(self, own_2BSKE: Tensor) -> "GatheredGradients":
        return GatheredGradients(own_2BSKE, self._group)


class GatheredGradients:
    """KeyGradients of the whole sequence on each rank, exchanged and summed when all are there."""

    def __init__(self, own_2BSKE: Tensor, group: ProcessGroup) -> None:
        B, S, K, E = own_2BSKE.shape[1:]
        self._sum_2BTKE = own_2BSKE.new_zeros(2, B, S * group.size(), K, E)
        self._group = group

    def add(self, step: Step, dkv_2BTKE: Tensor) -> None:
        self._sum_2BTKE[:, :, step.span] += dkv_2BTKE

    def collect(self) -> Tensor:
        by_rank = spread(self._sum_2BTKE, self._group.size(), POSITIONS)
        # gloo takes a strided tensor and sends other numbers.
        given = by_rank.movedim(POSITIONS, 0).contiguous()
        # Not reduce_scatter: gloo's is slower, and this sums in rank order everywhere.
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self._group)
        return taken.sum(0)


def _gather(tensors: list[Tensor], group: ProcessGroup) -> tuple[list[Tensor], list[Work]]:
    """Begins to gather each rank's contiguous tensors, (rank, ...). Every rank must call it, in step."""
    gathered = [tensor.new_empty(group.size(), *tensor.shape) for tensor in tensors]
    works = []
    for whole, tensor in zip(gathered, tensors, strict=True):
        assert tensor.is_contiguous(), tensor.stride()
        work = dist.all_gather(list(whole.unbind()), tensor, group=group, async_op=True)
        assert work is not None
        works.append(work)
    return gathered, works
