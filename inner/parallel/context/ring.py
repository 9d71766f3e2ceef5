"""Ring attention (2310.01889): keys and values pass around the ranks of cp, whose queries attend to
them in turn.

In zigzag order each rank holds two chunks of the sequence. Its queries see these keys

    of a lower rank     the first chunk only, because the second comes after both of this rank's
                        chunks
    of a higher rank    both chunks, but only from this rank's second chunk, because its first comes
                        before both

so in every step except the first, each rank computes the same half of a square of scores.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from inner.data.micro_batch import Packing
from inner.parallel.context.block_attention import KeyBlock, ScoreBlock
from inner.parallel.context.zigzag import zigzag_piece, zigzag_positions


class Ring:
    """A KeyExchange that passes keys on to the next rank, and receives the next keys while it uses
    the current ones.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def blocks(self, kv_2BSKE: Tensor, packing: Packing | None) -> Iterator[ScoreBlock]:
        rank = self._group.rank()
        num_ranks = self._group.size()
        for number in range(num_ranks):
            source = (rank - number) % num_ranks
            incoming = (
                _send_to_next(kv_2BSKE, self._group)
                if number < num_ranks - 1
                else _Incoming(kv_2BSKE, [])
            )
            documents_BT = (
                None if packing is None else zigzag_piece(packing.sequences_BT, num_ranks, source)
            )
            positions_T = zigzag_positions(kv_2BSKE.shape[2], num_ranks, source)
            yield _score_block(rank, source, KeyBlock(kv_2BSKE, documents_BT, positions_T))
            kv_2BSKE = incoming.wait()

    @property
    def num_ranks(self) -> int:
        return self._group.size()

    def positions_at(self, num_positions: int) -> np.ndarray:
        return zigzag_positions(num_positions, self.num_ranks, self._group.rank())

    def gradients(self, own_2BSKE: Tensor) -> "RingGradients":
        return RingGradients(own_2BSKE, self._group)


class RingGradients:
    """KeyGradients that travel one step behind the keys. The last step sends them back to the keys'
    own rank.
    """

    def __init__(self, own_2BSKE: Tensor, group: ProcessGroup) -> None:
        self._incoming = _Incoming(torch.zeros_like(own_2BSKE), [])
        self._group = group

    def add(self, block: ScoreBlock, dkv_2BTKE: Tensor) -> None:
        sum_2BSKE = self._incoming.wait()
        sum_2BSKE[:, :, block.span] += dkv_2BTKE
        self._incoming = _send_to_next(sum_2BSKE, self._group)

    def collect(self) -> Tensor:
        return self._incoming.wait()


def _score_block(rank: int, source: int, keys: KeyBlock) -> ScoreBlock:
    everything = slice(None)
    half = keys.kv_2BTKE.shape[2] // 2
    if source < rank:
        return ScoreBlock(everything, keys, slice(0, half), is_own=False)
    if source > rank:
        return ScoreBlock(slice(half, None), keys, everything, is_own=False)
    return ScoreBlock(everything, keys, everything, is_own=True)


class _Incoming(NamedTuple):
    """A tensor that is being received from the previous rank."""

    tensor: Tensor
    works: list[Work]

    def wait(self) -> Tensor:
        """Wait until the tensor has arrived and this rank's own tensor has been sent."""
        for work in self.works:
            work.wait()
        return self.tensor


def _send_to_next(tensor: Tensor, group: ProcessGroup) -> _Incoming:
    """Start sending to the next rank and receiving a tensor of the same shape from the previous
    rank. All ranks must call it in the same order.
    """
    # gloo accepts a strided tensor but sends the wrong numbers.
    assert tensor.is_contiguous(), tensor.stride()
    received = torch.empty_like(tensor)
    after = (group.rank() + 1) % group.size()
    before = (group.rank() - 1) % group.size()
    send = P2POp(dist.isend, tensor, group=group, group_peer=after)
    receive = P2POp(dist.irecv, received, group=group, group_peer=before)
    return _Incoming(received, dist.batch_isend_irecv([send, receive]))
