"""Context parallelism: a sequence is spread over the ranks of cp, and only attention reads other
ranks' positions.

ring        zigzag      keys and values pass around, w - 1 messages overlap compute    least memory
all_gather  zigzag      the same bytes in one message                                  large kernels
ulysses     contiguous  heads are exchanged for positions                              fewest bytes
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inner.config import ContextMethod
from inner.model.attention import Attend
from inner.parallel.context.all_gather import AllGather
from inner.parallel.context.block_attention import block_attention
from inner.parallel.context.ring import Ring
from inner.parallel.context.ulysses import ulysses_attention
from inner.parallel.context.zigzag import zigzag_split


def rank_positions(method: ContextMethod, seq_len: int, cp: int, cp_rank: int) -> Tensor:
    """Return the positions in the sequence that a rank holds, in its own order: int64 (seq_len /
    cp,) on the CPU.
    """
    everywhere = torch.arange(seq_len, device="cpu")
    if cp == 1:
        return everywhere
    return (
        everywhere.view(cp, -1)[cp_rank]
        if method == "ulysses"
        else zigzag_split(everywhere, cp, dim=0)[cp_rank]
    )


def build_attend(method: ContextMethod, group: ProcessGroup) -> Attend:
    """Build `causal_attention` over the ranks of `group`, each at its `rank_positions`. All ranks
    must call it in the same order.
    """
    if method == "ulysses":
        attend = partial(ulysses_attention, group=group)
    else:
        attend = partial(
            block_attention, exchange=Ring(group) if method == "ring" else AllGather(group)
        )
    # torch.compile would break the graph at every exchange, and hangs in the exchange of
    # all_gather.
    return torch.compiler.disable(attend)  # pyright: ignore[reportReturnType] - of many overloads
