"""Attention to gathered keys, as in Llama 3 (2407.21783, 3.3.2): each rank of cp temporarily holds all keys.

It has the ring's order of positions and sends as many bytes, but in one message instead of w - 1, and computes three
blocks of scores instead of w. In exchange it needs memory for the keys and values of the whole sequence.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from inner.parallel.context.block_attention import KeyBlock, ScoreBlock
from inner.parallel.context.zigzag import zigzag_join, zigzag_split

POSITIONS = 2
"""Dimension of positions in kv_2BSKE."""


class AllGather:
    """A KeyExchange that gathers all keys while the rank's own keys are used."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def blocks(self, keys: KeyBlock) -> Iterator[ScoreBlock]:
        gathered, works = _gather([tensor for tensor in keys if tensor is not None], self._group)
        everything = slice(None)
        yield ScoreBlock(everything, keys, everything, is_own=True)
        for work in works:
            work.wait()
        kv, *documents = gathered
        documents_BT = zigzag_join(documents[0].movedim(0, 1), 1) if documents else None
        sequence = KeyBlock(zigzag_join(kv.movedim(0, POSITIONS), POSITIONS), documents_BT)
        rank, chunk, seq_len = self._group.rank(), kv.shape[1 + POSITIONS] // 2, sequence.kv_2BTKE.shape[POSITIONS]
        before_both, between = slice(0, rank * chunk), slice((rank + 1) * chunk, seq_len - (rank + 1) * chunk)
        if before_both.start < before_both.stop:
            yield ScoreBlock(everything, sequence, before_both, is_own=False)
        if between.start < between.stop:
            yield ScoreBlock(slice(chunk, None), sequence, between, is_own=False)

    def gradients(self, own_2BSKE: Tensor) -> "GatheredGradients":
        return GatheredGradients(own_2BSKE, self._group)


class GatheredGradients:
    """KeyGradients that each rank accumulates for the whole sequence, then exchanges and sums at the end."""

    def __init__(self, own_2BSKE: Tensor, group: ProcessGroup) -> None:
        B, S, K, E = own_2BSKE.shape[1:]
        self._sum_2BTKE = own_2BSKE.new_zeros(2, B, S * group.size(), K, E)
        self._group = group

    def add(self, block: ScoreBlock, dkv_2BTKE: Tensor) -> None:
        self._sum_2BTKE[:, :, block.span] += dkv_2BTKE

    def collect(self) -> Tensor:
        # gloo accepts a strided tensor but sends the wrong numbers.
        send = zigzag_split(self._sum_2BTKE, self._group.size(), POSITIONS).movedim(POSITIONS, 0).contiguous()
        # gloo's reduce_scatter is slower, and this sums in rank order on every rank.
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self._group)
        return received.sum(0)


def _gather(tensors: list[Tensor], group: ProcessGroup) -> tuple[list[Tensor], list[Work]]:
    """Start gathering each rank's contiguous tensors, each (rank, ...). Every rank must call it, in step."""
    gathered = [tensor.new_empty(group.size(), *tensor.shape) for tensor in tensors]
    works = []
    for whole, tensor in zip(gathered, tensors, strict=True):
        assert tensor.is_contiguous(), tensor.stride()
        work = dist.all_gather(list(whole.unbind()), tensor, group=group, async_op=True)
        assert work is not None
        works.append(work)
    return gathered, works
