"""Context parallelism: a sequence is spread over the ranks of cp; only attention looks beyond a rank's positions.

ring          zigzag        keys and values go round, w - 1 messages behind the computing   least memory
all_gather    zigzag        the same bytes at once                                          few large kernels
ulysses       contiguous    heads are traded for positions                                  fewest bytes
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inner.attention import Attend
from inner.config import ContextMethod
from inner.parallel.all_gather import AllGather
from inner.parallel.blocks import block_attention
from inner.parallel.ring import Ring
from inner.parallel.ulysses import ulysses_attention
from inner.parallel.zigzag import spread


def positions(method: ContextMethod, seq_len: int, cp: int, cp_rank: int) -> Tensor:
    """Where in the sequence a rank's positions lie, in its order: int64 (seq_len / cp,) on the CPU."""
    everywhere = torch.arange(seq_len, device="cpu")
    if cp == 1:
        return everywhere
    return everywhere.view(cp, -1)[cp_rank] if method == "ulysses" else spread(everywhere, cp, dim=0)[cp_rank]


def build_attend(method: ContextMethod, group: ProcessGroup) -> Attend:
    """`causal_attention` over all ranks of `group`, each with its `positions`. Every rank must call it, in step."""
    if method == "ulysses":
        attend = partial(ulysses_attention, group=group)
    else:
        attend = partial(block_attention, exchange=Ring(group) if method == "ring" else AllGather(group))
    # torch.compile would break the graph at every exchange, and does not come back from all_gather's.
    return torch.compiler.disable(attend)  # pyright: ignore[reportReturnType] - of many overloads
