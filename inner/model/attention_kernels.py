"""Attention kernels that also return the log-sum-exp of the scores, with which results for parts of
the keys are merged.

    dense     queries see all keys, or causally the keys up to their own position
    varlen    documents lie one after the other, and attention is causal within each: there is no
              mask

Shape suffixes: B sequences, S positions of the queries, T of the keys, H heads, K key-value heads,
E head size, M positions of all documents, N - 1 documents. H / K heads read the same keys and
values, which are not repeated.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
FLASH_CAPABILITY = (8, 0)
"""CUDA capability of the first GPUs with FlashAttention (Ampere)."""
FLASH_MOST_HEAD_DIM = 256


class AttentionOutput(NamedTuple):
    """Attention of queries to some keys, and the log-sum-exp of the scores in fp32 (fp64 for fp64
    inputs).
    """

    out_BHSE: Tensor
    lse_BHS: Tensor


def dense_forward(
    q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *, is_causal: bool
) -> AttentionOutput:
    """Compute attention to these keys only; S = T if it is causal."""
    inputs = q_BHSE, k_BKTE, v_BKTE
    if q_BHSE.is_cpu:
        return AttentionOutput(
            *aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, is_causal)
        )
    if _has_flash(q_BHSE):
        return AttentionOutput(
            *aten._scaled_dot_product_flash_attention(*inputs, 0.0, is_causal)[:2]
        )
    # This kernel, unlike the others, needs separate keys for each head.
    k_BHTE, v_BHTE = (repeat_heads(x, q_BHSE.shape[1]) for x in (k_BKTE, v_BKTE))
    out_BHSE, lse_BHS, *_ = aten._scaled_dot_product_efficient_attention(
        q_BHSE, k_BHTE, v_BHTE, None, True, 0.0, is_causal
    )
    # The kernel pads the rows of the log-sum-exp to a multiple of 32.
    return AttentionOutput(out_BHSE, lse_BHS[..., : q_BHSE.shape[2]])


def dense_backward(
    grad_BHSE: Tensor,
    q_BHSE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    output: AttentionOutput,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients dq_BHSE, dk_BKTE and dv_BKTE through these keys, in the dtype of the
    inputs.

    `output` is the attention to all keys that the queries see, not only to these, in the queries'
    dtype.
    """
    inputs = grad_BHSE, q_BHSE, k_BKTE, v_BKTE
    output = AttentionOutput(output.out_BHSE, output.lse_BHS.contiguous())
    if q_BHSE.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, *output, 0.0, is_causal
        )
    # Without dropout the random state is not read.
    seed = offset = torch.zeros(2, dtype=torch.int64, device=q_BHSE.device)
    if _has_flash(q_BHSE):
        lengths = q_BHSE.shape[2], k_BKTE.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *inputs, *output, None, None, *lengths, 0.0, is_causal, seed, offset
        )
    num_heads = q_BHSE.shape[1]
    num_kv_heads = k_BKTE.shape[1]
    k_BHTE, v_BHTE = (repeat_heads(x, num_heads) for x in (k_BKTE, v_BKTE))
    padded_lse = F.pad(output.lse_BHS, (0, -q_BHSE.shape[2] % 32), value=torch.inf)
    dq_BHSE, *dkv = aten._scaled_dot_product_efficient_attention_backward(
        grad_BHSE, q_BHSE, k_BHTE, v_BHTE, None, output.out_BHSE, padded_lse, seed, offset, 0.0,
        (True, True, True, False), is_causal,
    )[:3]  # fmt: skip
    dk_BKTE, dv_BKTE = (grad.unflatten(1, (num_kv_heads, -1)).sum(2) for grad in dkv)
    return dq_BHSE, dk_BKTE, dv_BKTE


def repeat_heads(x_BKTE: Tensor, num_heads: int) -> Tensor:
    """Repeat keys or values for `num_heads` heads, x_BHTE: each head gets a copy of its group's
    values.
    """
    return x_BKTE.repeat_interleave(num_heads // x_BKTE.shape[1], dim=1)


def _has_flash(q: Tensor) -> bool:
    """Return whether FlashAttention supports such queries (..., E). A dry run's device counts as a
    GPU that has it.
    """
    if (
        q.dtype not in (torch.bfloat16, torch.float16)
        or q.shape[-1] % 8
        or q.shape[-1] > FLASH_MOST_HEAD_DIM
    ):
        return False
    if q.device.type != "cuda":
        return True
    is_new = torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY
    return is_new and torch.backends.cuda.is_flash_attention_available()


@torch.library.custom_op("inner::varlen_forward", mutates_args=())
def varlen_forward(
    q_MHE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    bounds_N: Tensor,
    host_bounds_N: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Return attention out_MHE within each document, and lse_HM. The bounds come from a Packing.
    Differentiable.

    This is a custom operator, so that torch.compile, recomputation and a dry run see one step on
    every device. CUDA has one kernel for all documents. Elsewhere, and for inputs that this kernel
    does not support, the dense kernel runs once per document.
    """
    if not q_MHE.is_cpu and _has_flash(q_MHE):
        return _flash_varlen_forward(q_MHE, k_MKE, v_MKE, bounds_N, longest)
    out_MHE, lse_HM = _empty_output(q_MHE)
    for here in _each_document(host_bounds_N):
        out, lse = dense_forward(
            *(_heads_first(x[here]) for x in (q_MHE, k_MKE, v_MKE)), is_causal=True
        )
        out_MHE[here] = out[0].transpose(0, 1)
        lse_HM[:, here] = lse[0]
    return out_MHE, lse_HM


@torch.library.custom_op("inner::varlen_backward", mutates_args=())
def varlen_backward(
    grad_MHE: Tensor,
    q_MHE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    out_MHE: Tensor,
    lse_HM: Tensor,
    bounds_N: Tensor,
    host_bounds_N: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients dq_MHE, dk_MKE and dv_MKE within each document; `out_MHE` and `lse_HM`
    as in `dense_backward`.
    """
    inputs = grad_MHE.contiguous(), q_MHE, k_MKE, v_MKE, out_MHE
    if not q_MHE.is_cpu and _has_flash(q_MHE):
        return _flash_varlen_backward(*inputs, lse_HM, bounds_N, longest)
    gradients = tuple(x.new_empty(x.shape) for x in (q_MHE, k_MKE, v_MKE))
    for here in _each_document(host_bounds_N):
        grad, q, k, v, out = (_heads_first(x[here]) for x in inputs)
        found = dense_backward(
            grad, q, k, v, AttentionOutput(out, lse_HM[None, :, here]), is_causal=True
        )
        for whole, new in zip(gradients, found, strict=True):
            whole[here] = new[0].transpose(0, 1)
    dq_MHE, dk_MKE, dv_MKE = gradients
    return dq_MHE, dk_MKE, dv_MKE


VARLEN_OPERATOR = torch.ops.inner.varlen_forward.default


def _flash_varlen_forward(
    q_MHE: Tensor, k_MKE: Tensor, v_MKE: Tensor, bounds_N: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    ends = bounds_N, bounds_N, longest, longest
    out_MHE, lse_HM, *_ = aten._flash_attention_forward(
        q_MHE, k_MKE, v_MKE, *ends, 0.0, True, False
    )
    return out_MHE, lse_HM


def _flash_varlen_backward(
    grad_MHE: Tensor,
    q_MHE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    out_MHE: Tensor,
    lse_HM: Tensor,
    bounds_N: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    ends = bounds_N, bounds_N, longest, longest
    # As in torch.nn.attention.varlen: without dropout the random state is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=q_MHE.device)
    unused = q_MHE.new_empty(0)
    inputs = grad_MHE, q_MHE, k_MKE, v_MKE, out_MHE, lse_HM
    return aten._flash_attention_backward(*inputs, *ends, 0.0, True, state, unused)


def _empty_output(q_MHE: Tensor) -> tuple[Tensor, Tensor]:
    num_positions, num_heads, _ = q_MHE.shape
    dtype = torch.promote_types(q_MHE.dtype, torch.float32)
    return q_MHE.new_empty(q_MHE.shape), q_MHE.new_empty(num_heads, num_positions, dtype=dtype)


def _each_document(host_bounds_N: Tensor) -> Iterator[slice]:
    return (slice(begin, end) for begin, end in pairwise(host_bounds_N.tolist()))


def _heads_first(x_MHE: Tensor) -> Tensor:
    """View the positions as one sequence, (1, H, M, E)."""
    return x_MHE.transpose(0, 1).unsqueeze(0)


@varlen_forward.register_fake
def _fake_forward(q_MHE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_output(q_MHE)


@varlen_backward.register_fake
def _fake_backward(
    _grad: Tensor, q_MHE: Tensor, k_MKE: Tensor, v_MKE: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q_MHE.new_empty(q_MHE.shape), k_MKE.new_empty(k_MKE.shape), v_MKE.new_empty(v_MKE.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_MHE: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q_MHE, k_MKE, v_MKE, bounds_N, host_bounds_N, out_MHE, lse_HM = ctx.saved_tensors
    inputs = grad_MHE, q_MHE, k_MKE, v_MKE, out_MHE, lse_HM
    return *varlen_backward(*inputs, bounds_N, host_bounds_N, ctx.longest), None, None, None


varlen_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)
