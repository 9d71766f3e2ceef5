"""Ring attention (2310.01889): keys and values pass around the ranks of cp, whose queries attend to them in turn.

In zigzag order a rank's queries see

    of a lower rank     its first chunk; its second chunk comes after both of theirs
    of a higher rank    both chunks, but only from their own second chunk; their first comes before both

so in every step but the first each rank computes the same half of a square of scores.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from inner.parallel.context.block_attention import KeyBlock, ScoreBlock


class Ring:
    """A KeyExchange that passes keys on to the next rank and receives the next ones while it uses them."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def blocks(self, keys: KeyBlock) -> Iterator[ScoreBlock]:
        rank, num_ranks = self._group.rank(), self._group.size()
        for number in range(num_ranks):
            tensors = [tensor for tensor in keys if tensor is not None]
            incoming = _send_to_next(tensors, self._group) if number < num_ranks - 1 else _Incoming(tensors, [])
            yield _score_block(rank, (rank - number) % num_ranks, keys)
            kv_2BSKE, *documents = incoming.wait()
            keys = KeyBlock(kv_2BSKE, documents[0] if documents else None)

    def gradients(self, own_2BSKE: Tensor) -> "RingGradients":
        return RingGradients(own_2BSKE, self._group)


class RingGradients:
    """KeyGradients that travel one step behind the keys; the last step sends them back to their own rank."""

    def __init__(self, own_2BSKE: Tensor, group: ProcessGroup) -> None:
        self._incoming = _Incoming([torch.zeros_like(own_2BSKE)], [])
        self._group = group

    def add(self, block: ScoreBlock, dkv_2BTKE: Tensor) -> None:
        (sum_2BSKE,) = self._incoming.wait()
        sum_2BSKE[:, :, block.span] += dkv_2BTKE
        self._incoming = _send_to_next([sum_2BSKE], self._group)

    def collect(self) -> Tensor:
        return self._incoming.wait()[0]


def _score_block(rank: int, source: int, keys: KeyBlock) -> ScoreBlock:
    everything, half = slice(None), keys.kv_2BTKE.shape[2] // 2
    if source < rank:
        return ScoreBlock(everything, keys, slice(0, half), is_own=False)
    if source > rank:
        return ScoreBlock(slice(half, None), keys, everything, is_own=False)
    return ScoreBlock(everything, keys, everything, is_own=True)


class _Incoming(NamedTuple):
    """Tensors that are being received from the previous rank."""

    tensors: list[Tensor]
    works: list[Work]

    def wait(self) -> list[Tensor]:
        """Wait for the tensors to arrive, and for those of this rank to be sent."""
        for work in self.works:
            work.wait()
        return self.tensors


def _send_to_next(tensors: list[Tensor], group: ProcessGroup) -> _Incoming:
    """Start sending to the next rank and receiving the same shapes from the previous one; all ranks call it in step."""
    # gloo accepts a strided tensor but sends the wrong numbers.
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in tensors]
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sends = [P2POp(dist.isend, tensor, group=group, group_peer=after) for tensor in tensors]
    receives = [P2POp(dist.irecv, tensor, group=group, group_peer=before) for tensor in received]
    return _Incoming(received, dist.batch_isend_irecv(sends + receives))
