"""Multi-token prediction (DeepSeek-V3, 2412.19437, eq. 21-25): extra depths that predict further
tokens in training.

With t_i the token at position i, and h_0 what the head reads to predict t_{i+1}:

    h'_d = W [norm(embedding of t_{i+d}); norm(h_{d-1})]
    h_d  = norm(block(h'_d))            what the head reads to predict t_{i+d+1}

    loss of depth d = sum of its cross-entropies / number of targets of the main loss
    training loss   = main loss + weight / depths x sum over d of the losses of the depths

As in the paper, where each loss is divided by the length of the sequence, all are divided by the
same number: that of the main targets of the whole step on all ranks, which is counted beforehand.
Embedding and head are those of the model. The last d positions of a sequence have no target at
depth d, and neither have positions whose document ends before t_{i+d}.

Shape suffixes: B sequences, S positions, D dim, P depths.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inner.model.sizes import ModelSizes


class Joint(nn.Module):
    """What the block of an extra depth has beside attention and feed-forward."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.stream_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.proj = nn.Linear(2 * sizes.dim, sizes.dim, bias=False)
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        """The last norm of the depth."""

    def forward(self, embedded_BSD: Tensor, stream_BSD: Tensor) -> Tensor:
        """Return the block's input, from the embedded tokens and what the head read one depth
        before.
        """
        return self.proj(
            torch.cat((self.token_norm(embedded_BSD), self.stream_norm(stream_BSD)), dim=-1)
        )


def join(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors as results of one node of autograd's graph.

    The half of a split backward that computes the gradients of weights begins where the paths from
    a weight meet those from the stage's input. If the table met them at several depths, the half
    would pass through the blocks between these depths, and through each of them a second time for
    its own weights, which autograd refuses. After this node, the table meets them here only.
    """
    joined = _Join.apply(*tensors)
    assert isinstance(joined, tuple)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def add_gradient(loss: Tensor, other: Tensor) -> Tensor:
    """Return `loss`, whose backward is that of `loss + other`. Both are 0-dim."""
    carried = _AddedGradient.apply(loss, other)
    assert isinstance(carried, Tensor)
    return carried


class _AddedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], grads[0]


@contextmanager
def recording_depths(
    stages: Sequence[Any], num_depths: int, device: torch.device
) -> Iterator[Tensor]:
    """Let these stages add what the depths do inside the block to the returned tensor (2, P), fp64:
    the summed losses, and the numbers of their targets. It stays 0 except on the rank of the last
    stage.
    """
    sums_2P = torch.zeros(2, num_depths, dtype=torch.float64, device=device)
    recording = stages if num_depths else ()
    for stage in recording:
        stage.depth_sums_2P = sums_2P
    try:
        yield sums_2P
    finally:
        for stage in recording:
            stage.depth_sums_2P = None


def mean_losses(sums: list[float]) -> tuple[float, ...]:
    """Return the mean loss of each depth, from the summed losses and then the numbers of
    targets.
    """
    num_depths = len(sums) // 2
    return tuple(
        total / max(count, 1)
        for total, count in zip(sums[:num_depths], sums[num_depths:], strict=True)
    )
