"""Causal attention of one process.

Shape suffixes: B sequences, S positions, H heads, K key-value heads, E head size, M = B S positions of a micro-batch.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inner.data.micro_batch import Packing
from inner.model.attention_kernels import repeat_heads, varlen_forward

Attend = Callable[[Tensor, Tensor, Tensor, Packing | None], Tensor]
"""(q_BSHE, k_BSKE, v_BSKE, packing or None) -> y_BSHE; see `causal_attention`."""


def causal_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, packing: Packing | None = None) -> Tensor:
    """Return causal attention y_BSHE. With a packing, each position attends within its own document
    only.

    Memory and work do not grow with pairs of positions in different documents.
    """
    if packing is None:
        q_BHSE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        if q_BHSE.dtype == torch.float32 and not q_BHSE.is_cpu:
            # On GPUs no fused fp32 kernel lets heads share keys: torch would hold all S x S scores
            # instead.
            k_BKSE, v_BKSE = (repeat_heads(x, q_BHSE.shape[1]) for x in (k_BKSE, v_BKSE))
        y_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True)
        return y_BHSE.transpose(1, 2)
    flat = [x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE)]
    y_MHE, _ = varlen_forward(*flat, packing.bounds_N, packing.host_bounds_N, packing.longest)
    return y_MHE.unflatten(0, q_BSHE.shape[:2])
