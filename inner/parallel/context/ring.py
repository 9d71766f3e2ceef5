"""Ring attention (2310.01889): keys and values go round the ranks of cp, whose queries look at them as they pass.

In zigzag order a rank's queries see

    from a lower rank     its first chunk; the second comes after both of theirs
    from a higher rank    both chunks, but with their second only; the first comes before both

so that in every step but the first each rank has the same half of a square of scores to compute.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from inner.parallel.blocks import Keys, Step


class Ring:
    """An Exchange: each step sends on what it uses, the next keys are under way meanwhile."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def steps(self, keys: Keys) -> Iterator[Step]:
        rank, num_ranks = self._group.rank(), self._group.size()
        for number in range(num_ranks):
            held = [tensor for tensor in keys if tensor is not None]
            is_last = number == num_ranks - 1
            coming = _Coming(held, []) if is_last else _pass_on(held, self._group)
            yield _step(rank, (rank - number) % num_ranks, keys)
            kv_2BSKE, *documents = coming.wait()
            keys = Keys(kv_2BSKE, documents[0] if documents else None)

    def gradients(self, own_2BSKE: Tensor) -> "RingGradients":
        return RingGradients(own_2BSKE, self._group)


class RingGradients:
    """KeyGradients that follow the keys one step behind; what the last rank sends on comes home."""

    def __init__(self, own_2BSKE: Tensor, group: ProcessGroup) -> None:
        self._coming = _Coming([torch.zeros_like(own_2BSKE)], [])
        self._group = group

    def add(self, step: Step, dkv_2BTKE: Tensor) -> None:
        (sum_2BSKE,) = self._coming.wait()
        sum_2BSKE[:, :, step.span] += dkv_2BTKE
        self._coming = _pass_on([sum_2BSKE], self._group)

    def collect(self) -> Tensor:
        return self._coming.wait()[0]


def _step(rank: int, source: int, keys: Keys) -> Step:
    everything, half = slice(None), keys.kv_2BTKE.shape[2] // 2
    if source < rank:
        return Step(everything, keys, slice(0, half), is_own=False)
    if source > rank:
        return Step(slice(half, None), keys, everything, is_own=False)
    return Step(everything, keys, everything, is_own=True)


class _Coming(NamedTuple):
    """Tensors on their way from the rank before."""

    tensors: list[Tensor]
    works: list[Work]

    def wait(self) -> list[Tensor]:
        """The tensors, arrived; what was sent has left, too."""
        for work in self.works:
            work.wait()
        return self.tensors


def _pass_on(tensors: list[Tensor], group: ProcessGroup) -> _Coming:
    """Begins to send to the next rank, and to receive as much from the one before. Every rank must call it, in step."""
    # gloo takes a strided tensor and sends other numbers.
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
    coming = [torch.empty_like(tensor) for tensor in tensors]
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sends = [P2POp(dist.isend, tensor, group=group, group_peer=after) for tensor in tensors]
    receives = [P2POp(dist.irecv, tensor, group=group, group_peer=before) for tensor in coming]
    return _Coming(coming, dist.batch_isend_irecv(sends + receives))
