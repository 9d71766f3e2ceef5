"""Causal attention of one process, and the kernels from which context parallelism builds its attention.

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
    """Causal attention y_BSHE; with `documents_BS`, each position attends within its own document only.

    `documents_BS` is int64 and does not decrease along a sequence.
    """
    q_BHSE, k_BKSE, v_BKSE = q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2)
    if documents_BS is None:
        y_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True)
    else:
        seen_B1SS = same_document(documents_BS, documents_BS).tril()
        y_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, attn_mask=seen_B1SS, enable_gqa=True)
    return y_BHSE.transpose(1, 2)


def same_document(documents_BS: Tensor, documents_BT: Tensor) -> Tensor:
    """Mask of the keys in the same document as each query, bool (B, 1, S, T)."""
    return documents_BS[:, None, :, None] == documents_BT[:, None, None, :]


class Mask(NamedTuple):
    """Which keys the queries see: all, those up to their own position (causal, S = T), or by a bias (B, 1, S, T)."""

    is_causal: bool
    bias: Tensor | None = None


class AttentionOutput(NamedTuple):
    """Attention of some queries to some keys, and the log-sum-exp of the scores in fp32 (fp64 for fp64 inputs)."""

    out_BHSE: Tensor
    lse_BHS: Tensor


def attention_bias(seen_B1ST: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias that is 0 where seen and UNSEEN elsewhere. Rows start at multiples of 16 elements, as CUDA requires."""
    bias_B1ST = torch.zeros(seen_B1ST.shape, dtype=dtype, device=seen_B1ST.device).masked_fill_(~seen_B1ST, UNSEEN)
    num_keys = seen_B1ST.shape[-1]
    return F.pad(bias_B1ST, (0, -num_keys % 16))[..., :num_keys]


def kernel_forward(q_BHSE: Tensor, kv_2BKTE: Tensor, mask: Mask) -> AttentionOutput:
    """Attention to these keys alone. A query that sees none of them gets an arbitrary mean and an lse near UNSEEN."""
    k_BHTE, v_BHTE = _repeat_heads(kv_2BKTE, q_BHSE.shape[1])
    mask = _expand_bias(mask, q_BHSE)
    if not q_BHSE.is_cpu:
        return _cuda_forward(q_BHSE, k_BHTE, v_BHTE, mask)
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    return AttentionOutput(*forward(q_BHSE, k_BHTE, v_BHTE, 0.0, mask.is_causal, attn_mask=mask.bias))


def kernel_backward(
    grad_BHSE: Tensor, q_BHSE: Tensor, kv_2BKTE: Tensor, output: AttentionOutput, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Gradients through these keys: of q_BHSE in its dtype, and of kv_2BKTE in the dtype of the log-sum-exp.

    `output` is the attention to all keys that the queries see, not to these alone. Its output has the queries' dtype.
    """
    num_heads, num_kv_heads = q_BHSE.shape[1], kv_2BKTE.shape[2]
    k_BHTE, v_BHTE = _repeat_heads(kv_2BKTE, num_heads)
    output = AttentionOutput(output.out_BHSE, output.lse_BHS.contiguous())
    mask = _expand_bias(mask, q_BHSE)
    if q_BHSE.is_cpu:
        dq_BHSE, dk_BHTE, dv_BHTE = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHSE, q_BHSE, k_BHTE, v_BHTE, *output, 0.0, mask.is_causal, attn_mask=mask.bias
        )
    else:
        dq_BHSE, dk_BHTE, dv_BHTE = _cuda_backward(grad_BHSE, q_BHSE, k_BHTE, v_BHTE, output, mask)
    shared = num_kv_heads, num_heads // num_kv_heads
    dkv = [grad.unflatten(1, shared).sum(2, dtype=output.lse_BHS.dtype) for grad in (dk_BHTE, dv_BHTE)]
    return dq_BHSE, torch.stack(dkv)


def _repeat_heads(kv_2BKTE: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values, repeated so that each query head has its own."""
    num_kv_heads = kv_2BKTE.shape[2]
    if num_kv_heads < num_heads:
        kv_2BKTE = kv_2BKTE.repeat_interleave(num_heads // num_kv_heads, dim=2)
    k_BHTE, v_BHTE = kv_2BKTE.unbind()
    return k_BHTE, v_BHTE


def _expand_bias(mask: Mask, q_BHSE: Tensor) -> Mask:
    """The mask with its bias expanded to all heads, (B, H, S, T); a view."""
    return mask if mask.bias is None else Mask(False, mask.bias.expand(-1, q_BHSE.shape[1], -1, -1))


# CUDA: written for the signatures of torch 2.13 and checked for shapes, but not yet run on a GPU.


def _has_flash(q_BHSE: Tensor, mask: Mask) -> bool:
    return mask.bias is None and q_BHSE.dtype in (torch.bfloat16, torch.float16)


def _cuda_forward(q_BHSE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, mask: Mask) -> AttentionOutput:
    inputs = q_BHSE, k_BHTE, v_BHTE
    if _has_flash(q_BHSE, mask):
        return AttentionOutput(*aten._scaled_dot_product_flash_attention(*inputs, 0.0, mask.is_causal)[:2])
    out_BHSE, lse_BHS, *_ = aten._scaled_dot_product_efficient_attention(*inputs, mask.bias, True, 0.0, mask.is_causal)
    # The kernel pads the rows of the log-sum-exp to a multiple of 32.
    return AttentionOutput(out_BHSE, lse_BHS[..., : q_BHSE.shape[2]])


def _cuda_backward(
    grad_BHSE: Tensor, q_BHSE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, output: AttentionOutput, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = grad_BHSE, q_BHSE, k_BHTE, v_BHTE
    # The random state is not read without dropout.
    seed = offset = torch.zeros(2, dtype=torch.int64, device=q_BHSE.device)
    if _has_flash(q_BHSE, mask):
        lengths = q_BHSE.shape[2], k_BHTE.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *inputs, *output, None, None, *lengths, 0.0, mask.is_causal, seed, offset
        )
    padded_lse = F.pad(output.lse_BHS, (0, -q_BHSE.shape[2] % 32), value=torch.inf)
    return aten._scaled_dot_product_efficient_attention_backward(
        *inputs, mask.bias, output.out_BHSE, padded_lse, seed, offset, 0.0, (True, True, True, False), mask.is_causal
    )[:3]
