"""Attention of one process, and the kernel of which context parallel makes its own.

Shape suffixes: B sequences, S positions of the queries, T of the keys, H heads, K key-value heads, E head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q_BSHE, k_BSKE, v_BSKE, documents_BS or None) -> y_BSHE; see `causal_attention`."""

UNSEEN = -1e30
"""Added to the score of a key that a query must not see. Finite: kernels disagree on rows that are all -inf."""


def causal_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """Each position's mean of the values up to its own, y_BSHE; with documents only of those in its document.

    `documents_BS`: int64, never falling along a sequence.
    """
    q_BHSE, k_BKSE, v_BKSE = q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2)
    if documents_BS is None:
        y_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True)
    else:
        seen_B1SS = same_document(documents_BS, documents_BS).tril()
        y_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, attn_mask=seen_B1SS, enable_gqa=True)
    return y_BHSE.transpose(1, 2)


def same_document(documents_BS: Tensor, documents_BT: Tensor) -> Tensor:
    """Which keys lie in a query's document, bool (B, 1, S, T)."""
    return documents_BS[:, None, :, None] == documents_BT[:, None, None, :]


class Mask(NamedTuple):
    """What the kernel's queries see: all keys; those up to their own (S = T); or by a bias (B, 1, S, T)."""

    is_causal: bool
    bias: Tensor | None = None


class Found(NamedTuple):
    """Attention of some queries to some keys, and the log-sum-exp of their scores, fp32 (fp64 for fp64)."""

    out_BHSE: Tensor
    lse_BHS: Tensor


def bias_of(seen_B1ST: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where seen and UNSEEN elsewhere; rows begin at multiples of 16 elements, as CUDA's kernel wants them."""
    bias_B1ST = torch.zeros(seen_B1ST.shape, dtype=dtype, device=seen_B1ST.device).masked_fill_(~seen_B1ST, UNSEEN)
    num_keys = seen_B1ST.shape[-1]
    return F.pad(bias_B1ST, (0, -num_keys % 16))[..., :num_keys]


def kernel_forward(q_BHSE: Tensor, kv_2BKTE: Tensor, mask: Mask) -> Found:
    """Attention to these keys alone. A query that sees none of them finds some mean, with UNSEEN or so as its lse."""
    k_BHTE, v_BHTE = _for_each_head(kv_2BKTE, q_BHSE.shape[1])
    mask = _for_whole_batch(mask, q_BHSE)
    if not q_BHSE.is_cpu:
        return _cuda_forward(q_BHSE, k_BHTE, v_BHTE, mask)
    return Found(
        *aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSE, k_BHTE, v_BHTE, 0.0, mask.is_causal, attn_mask=mask.bias
        )
    )


def kernel_backward(
    grad_BHSE: Tensor, q_BHSE: Tensor, kv_2BKTE: Tensor, found: Found, mask: Mask
) -> tuple[Tensor, Tensor]:
    """What these keys add to the gradients: of q_BHSE in its dtype, of kv_2BKTE in that of the log-sum-exp.

    `found`: in all keys that the queries see, not in these alone; its attention in the queries' dtype.
    """
    num_heads, num_kv_heads = q_BHSE.shape[1], kv_2BKTE.shape[2]
    k_BHTE, v_BHTE = _for_each_head(kv_2BKTE, num_heads)
    found = Found(found.out_BHSE, found.lse_BHS.contiguous())
    mask = _for_whole_batch(mask, q_BHSE)
    if q_BHSE.is_cpu:
        dq_BHSE, dk_BHTE, dv_BHTE = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHSE, q_BHSE, k_BHTE, v_BHTE, *found, 0.0, mask.is_causal, attn_mask=mask.bias
        )
    else:
        dq_BHSE, dk_BHTE, dv_BHTE = _cuda_backward(grad_BHSE, q_BHSE, k_BHTE, v_BHTE, found, mask)
    shared = num_kv_heads, num_heads // num_kv_heads
    dkv = [grad.unflatten(1, shared).sum(2, dtype=found.lse_BHS.dtype) for grad in (dk_BHTE, dv_BHTE)]
    return dq_BHSE, torch.stack(dkv)


def _for_each_head(kv_2BKTE: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each query head."""
    num_kv_heads = kv_2BKTE.shape[2]
    if num_kv_heads < num_heads:
        kv_2BKTE = kv_2BKTE.repeat_interleave(num_heads // num_kv_heads, dim=2)
    k_BHTE, v_BHTE = kv_2BKTE.unbind()
    return k_BHTE, v_BHTE


def _for_whole_batch(mask: Mask, q_BHSE: Tensor) -> Mask:
    """The mask with its bias for each head, (B, H, S, T); a view."""
    return mask if mask.bias is None else Mask(False, mask.bias.expand(-1, q_BHSE.shape[1], -1, -1))


# CUDA: written from the signatures of torch 2.13 and checked for shapes; not run yet, for want of a GPU.


def _has_flash(q_BHSE: Tensor, mask: Mask) -> bool:
    return mask.bias is None and q_BHSE.dtype in (torch.bfloat16, torch.float16)


def _cuda_forward(q_BHSE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, mask: Mask) -> Found:
    inputs = q_BHSE, k_BHTE, v_BHTE
    if _has_flash(q_BHSE, mask):
        return Found(*aten._scaled_dot_product_flash_attention(*inputs, 0.0, mask.is_causal)[:2])
    out_BHSE, lse_BHS, *_ = aten._scaled_dot_product_efficient_attention(*inputs, mask.bias, True, 0.0, mask.is_causal)
    # The kernel rounds the number of rows up to 32.
    return Found(out_BHSE, lse_BHS[..., : q_BHSE.shape[2]])


def _cuda_backward(
    grad_BHSE: Tensor, q_BHSE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, found: Found, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = grad_BHSE, q_BHSE, k_BHTE, v_BHTE
    # Without dropout nothing reads the random state.
    seed = offset = torch.zeros(2, dtype=torch.int64, device=q_BHSE.device)
    if _has_flash(q_BHSE, mask):
        lengths = q_BHSE.shape[2], k_BHTE.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *inputs, *found, None, None, *lengths, 0.0, mask.is_causal, seed, offset
        )
    padded_lse = F.pad(found.lse_BHS, (0, -q_BHSE.shape[2] % 32), value=torch.inf)
    return aten._scaled_dot_product_efficient_attention_backward(
        *inputs, mask.bias, found.out_BHSE, padded_lse, seed, offset, 0.0, (True, True, True, False), mask.is_causal
    )[:3]
