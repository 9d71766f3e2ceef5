"""DeepSpeed Ulysses (2309.14509): each rank of cp trades its positions of all heads for all positions of its heads.

Fewest bytes, and the attention of one process in between; but the heads must divide over the ranks, and a rank keeps
the queries, keys and values of all positions (of its heads) for the backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from inner.attention import causal_attention


def ulysses_attention(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents_BS: Tensor | None, *, group: ProcessGroup
) -> Tensor:
    """`causal_attention` of the whole sequence at this rank's positions. Every rank of `group` must call it, in step.

    Ranks hold positions in rank order; H and K are multiples of the group's size.
    """
    num_ranks = group.size()
    B, S, H, E = q_BSHE.shape
    # One exchange for all three: each rank's share of the heads, side by side.
    shares = [x.unflatten(2, (num_ranks, -1)) for x in (q_BSHE, k_BSKE, v_BSKE)]
    heads = [share.shape[3] for share in shares]
    taken = _exchange(torch.cat(shares, dim=3).movedim(2, 0), group)
    q, k, v = taken.movedim(0, 1).flatten(1, 2).split(heads, dim=2)
    y = causal_attention(q, k, v, None if documents_BS is None else _whole_sequence(documents_BS, group))
    taken = _exchange(y.unflatten(1, (num_ranks, S)).movedim(1, 0), group)
    return taken.movedim(0, 2).reshape(B, S, H, E)


def _exchange(given: Tensor, group: ProcessGroup) -> Tensor:
    """given[i] goes to rank i; result[i] came from rank i. Differentiable. Every rank must call it, in step."""
    taken = _Exchange.apply(given, group)
    assert isinstance(taken, Tensor)
    return taken


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # gloo takes a strided tensor, to send or to fill, and mixes up the numbers.
        given = given.contiguous()
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=group)
        return taken

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.group), None


def _whole_sequence(documents_BS: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's documents, one after the other."""
    whole = [torch.empty_like(documents_BS, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(whole, documents_BS.contiguous(), group=group)
    return torch.cat(whole, dim=1)
