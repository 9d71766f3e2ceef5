"""Attention to gathered keys, as in Llama 3 (2407.21783, 3.3.2): each rank of cp temporarily holds
all keys.

It uses the ring's order of positions and sends as many bytes, but in one message instead of w - 1,
and computes three blocks of scores instead of w. It needs more memory, for the keys and values of
the whole sequence.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from inner.data.micro_batch import Packing
from inner.parallel.context.block_attention import KeyBlock, ScoreBlock
from inner.parallel.context.zigzag import zigzag_join, zigzag_positions, zigzag_split

POSITIONS = 2
"""Dimension of positions in kv_2BSKE."""


class AllGather:
    """A KeyExchange that gathers all keys while the rank's own keys are used."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def blocks(self, kv_2BSKE: Tensor, packing: Packing | None) -> Iterator[ScoreBlock]:
        gathered, work = _gather(kv_2BSKE, self._group)
        everything = slice(None)
        rank = self._group.rank()
        own_S = self.positions_at(kv_2BSKE.shape[POSITIONS])
        yield ScoreBlock(everything, KeyBlock(kv_2BSKE, None, own_S), everything, is_own=True)
        work.wait()
        documents_BT = None if packing is None else packing.sequences_BT
        whole_2BTKE = zigzag_join(gathered.movedim(0, POSITIONS), POSITIONS)
        sequence = KeyBlock(whole_2BTKE, documents_BT, np.arange(whole_2BTKE.shape[POSITIONS]))
        chunk = kv_2BSKE.shape[POSITIONS] // 2
        seq_len = sequence.kv_2BTKE.shape[POSITIONS]
        before_both = slice(0, rank * chunk)
        between = slice((rank + 1) * chunk, seq_len - (rank + 1) * chunk)
        if before_both.start < before_both.stop:
            yield ScoreBlock(everything, sequence, before_both, is_own=False)
        if between.start < between.stop:
            yield ScoreBlock(slice(chunk, None), sequence, between, is_own=False)

    @property
    def num_ranks(self) -> int:
        return self._group.size()

    def positions_at(self, num_positions: int) -> np.ndarray:
        return zigzag_positions(num_positions, self.num_ranks, self._group.rank())

    def gradients(self, own_2BSKE: Tensor) -> "GatheredGradients":
        return GatheredGradients(own_2BSKE, self._group)


class GatheredGradients:
    """KeyGradients that each rank accumulates for the whole sequence, and that are exchanged and
    summed at the end.
    """

    def __init__(self, own_2BSKE: Tensor, group: ProcessGroup) -> None:
        B, S, K, E = own_2BSKE.shape[1:]
        self._sum_2BTKE = own_2BSKE.new_zeros(2, B, S * group.size(), K, E)
        self._group = group

    def add(self, block: ScoreBlock, dkv_2BTKE: Tensor) -> None:
        self._sum_2BTKE[:, :, block.span] += dkv_2BTKE

    def collect(self) -> Tensor:
        # gloo accepts a strided tensor but sends the wrong numbers.
        send = (
            zigzag_split(self._sum_2BTKE, self._group.size(), POSITIONS)
            .movedim(POSITIONS, 0)
            .contiguous()
        )
        # gloo's own reduce_scatter is slower. This exchange also sums in rank order on every rank.
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self._group)
        return received.sum(0)


def _gather(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Start gathering the contiguous tensors of all ranks, (rank, ...). All ranks must call it in
    the same order.
    """
    assert tensor.is_contiguous(), tensor.stride()
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    work = dist.all_gather(list(gathered.unbind()), tensor, group=group, async_op=True)
    assert work is not None
    return gathered, work
