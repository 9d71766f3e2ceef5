"""How tensor-parallel ranks share the residual stream: whole before a pair of matrices, summed over
ranks after it.

Each rank holds its block of the positions (sequence parallelism), or the whole stream. Gathering is
the backward of summing, and the reverse. torch.compile and recomputation see each of these
collectives as a single operator.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorStream:
    """The stream of one group of ranks. All ranks of the group must make each call together."""

    group_name: str
    num_ranks: int
    rank: int
    """This rank's number in the group."""
    is_split: bool
    """Whether each rank holds only its block of the positions."""

    def part_of(self, positions_S: Tensor) -> Tensor:
        """Return the positions of this rank's part of the stream."""
        return positions_S.chunk(self.num_ranks)[self.rank] if self.is_split else positions_S

    def gather(self, x_BSD: Tensor) -> Tensor:
        """Return the stream at all positions, from each rank's part. Gradients of the result are
        summed over the ranks.
        """
        whole_BSD = _Gather.apply(x_BSD, self)
        assert isinstance(whole_BSD, Tensor)
        return whole_BSD

    def scatter(self, part_BSD: Tensor) -> Tensor:
        """Sum `part_BSD` over the ranks, and return the part of the sum that this rank holds."""
        x_BSD = _Scatter.apply(part_BSD, self)
        assert isinstance(x_BSD, Tensor)
        return x_BSD


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, stream: TensorStream) -> Tensor:
        ctx.stream = stream
        return _gather(x_BSD, stream) if stream.is_split else x_BSD.view_as(x_BSD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grads[0], ctx.stream), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BSD: Tensor, stream: TensorStream) -> Tensor:
        ctx.stream = stream
        return _sum(part_BSD, stream)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grads[0], ctx.stream) if ctx.stream.is_split else grads[0], None


def _gather(x_BSD: Tensor, stream: TensorStream) -> Tensor:
    """Return the blocks of positions of all ranks, one after the other."""
    n = stream.num_ranks
    (B, S, D) = x_BSD.shape
    stacked = _functional.all_gather_into_tensor(x_BSD.contiguous(), n, stream.group_name)
    blocks_NBSD = _functional.wait_tensor(stacked).view(n, B, S, D)
    return blocks_NBSD.transpose(0, 1).reshape(B, n * S, D)


def _sum(part_BSD: Tensor, stream: TensorStream) -> Tensor:
    """Return the sum over the ranks, or this rank's block of its positions."""
    if not stream.is_split:
        return _functional.wait_tensor(
            _functional.all_reduce(part_BSD.contiguous(), "sum", stream.group_name)
        )
    n = stream.num_ranks
    (B, S, D) = part_BSD.shape
    stacked = part_BSD.view(B, n, S // n, D).transpose(0, 1).reshape(n * B, S // n, D)
    return _functional.wait_tensor(
        _functional.reduce_scatter_tensor(stacked.contiguous(), "sum", n, stream.group_name)
    )
