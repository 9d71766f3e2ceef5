"""DeepSpeed Ulysses (2309.14509): ranks of cp exchange all heads of their positions for all
positions of some heads.

It sends the fewest bytes and uses the attention of a single process. However, the number of ranks
must divide the numbers of heads, and each rank keeps the queries, keys and values of all positions
(of its heads) for the backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from inner.data.micro_batch import Packing
from inner.model.attention import causal_attention
from inner.model.span_attention import ScoreRule


def ulysses_attention(
    q_BSHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    packing: Packing | None = None,
    rule: ScoreRule | None = None,
    *,
    group: ProcessGroup,
) -> Tensor:
    """Compute `causal_attention` of the whole sequence at this rank's positions. All ranks of
    `group` must call it in the same order.

    Ranks hold contiguous positions in rank order. H and K are multiples of the group's size. The
    packing is for all positions.
    """
    num_ranks = group.size()
    B, S, H, E = q_BSHE.shape
    # One exchange moves queries, keys and values together, with each rank's share of the heads side
    # by side.
    shares = [x.unflatten(2, (num_ranks, -1)) for x in (q_BSHE, k_BSKE, v_BSKE)]
    heads = [share.shape[3] for share in shares]
    received = _exchange(torch.cat(shares, dim=3).movedim(2, 0), group)
    q, k, v = received.movedim(0, 1).flatten(1, 2).split(heads, dim=2)
    y = causal_attention(q, k, v, packing, rule)
    received = _exchange(y.unflatten(1, (num_ranks, S)).movedim(1, 0), group)
    return received.movedim(0, 2).reshape(B, S, H, E)


def _exchange(sent: Tensor, group: ProcessGroup) -> Tensor:
    """Send sent[i] to rank i; result[i] is from rank i. Differentiable. All ranks must call it in
    the same order.
    """
    received = _Exchange.apply(sent, group)
    assert isinstance(received, Tensor)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # gloo accepts strided tensors for sending and receiving, but mixes up their numbers.
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.group), None
