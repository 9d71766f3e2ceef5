"""Causal attention of one process.

Shape suffixes: B sequences, S positions, H heads, K key-value heads, E head size, M = B S positions
of a micro-batch.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inner.data.micro_batch import Packing
from inner.model.attention_kernels import repeat_heads, varlen_forward
from inner.model.span_attention import ScoreRule, span_attention


class Attend(Protocol):
    """Computes what `causal_attention` computes."""

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        packing: Packing | None = None,
        rule: ScoreRule | None = None,
        /,
    ) -> Tensor: ...


def causal_attention(
    q_BSHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    packing: Packing | None = None,
    rule: ScoreRule | None = None,
) -> Tensor:
    """Return causal attention y_BSHE. With a packing, each position attends within its own document
    only. `rule`: what changes the scores.

    Memory and work do not grow with pairs of positions in different documents.
    """
    rule = None if rule is None else rule.at(q_BSHE.shape[1])
    if rule is not None:
        heads_first = [x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE)]
        starts_BT = None if packing is None else packing.starts_BT
        slopes = None if rule.slopes is None else list(rule.slopes)
        y_BHSE, _ = span_attention(*heads_first, starts_BT, rule.window, rule.cap, slopes)
        return y_BHSE.transpose(1, 2)
    if packing is None:
        q_BHSE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        if q_BHSE.dtype == torch.float32 and not q_BHSE.is_cpu:
            # On GPUs no fused fp32 kernel lets heads share keys: torch would hold all S x S scores
            # instead.
            k_BKSE, v_BKSE = (repeat_heads(x, q_BHSE.shape[1]) for x in (k_BKSE, v_BKSE))
        y_BHSE = F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True
        )
        return y_BHSE.transpose(1, 2)
    flat = [x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE)]
    y_MHE, _ = varlen_forward(*flat, packing.bounds_N, packing.host_bounds_N, packing.longest)
    return y_MHE.unflatten(0, q_BSHE.shape[:2])
