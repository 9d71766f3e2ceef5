"""Make torch choose kernels for the dry run's device as for CUDA. torch chooses some of them by the
name of the device.

Without this, torch would use formulas that keep tensors which no GPU keeps, such as the matrix of
all attention scores.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

from inner.dry_run.accelerator import DEVICE_TYPE

aten = torch.ops.aten
_attention = F.scaled_dot_product_attention
_rms_norm = F.rms_norm


def choose_as_cuda_does() -> None:
    """Choose kernels as for CUDA for the rest of this process."""
    F.scaled_dot_product_attention = _fused_attention
    F.rms_norm = _fused_rms_norm
    register_op_impl(aten._grouped_mm.default)(_grouped_product)


def _grouped_product(
    mode: FakeTensorMode,
    func: Any,
    rows: Tensor,
    matrices: Tensor,
    offsets: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Return the result of torch's product with one matrix per group of rows, without values.
    torch's own result without values exists for bfloat16 only.

    Three dims are one matrix per group. Two stacks of rows, transposed to (inner, rows) and (rows,
    columns), give one product per group.
    """
    assert offsets is not None, "the groups are given by where they end"
    shape = (*rows.shape[:-1], matrices.shape[-1])
    if rows.ndim == matrices.ndim == 2:
        shape = (len(offsets), *shape)
    with mode:
        return rows.new_empty(shape)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> Tensor:
    if query.device.type != DEVICE_TYPE:
        return _attention(query, key, value, attn_mask, dropout_p, **options)
    is_causal = bool(options.get("is_causal"))
    assert attn_mask is None, "attention within documents has its own kernel"
    if query.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    # The other kernel needs the keys and values of each head.
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, dropout_p, is_causal
    )[0]


def _fused_rms_norm(
    values: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if values.device.type != DEVICE_TYPE:
        return _rms_norm(values, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(values, weight)


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps what CUDA's kernel keeps: the input, the weight, and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(
            values, weight, torch.empty_like(values[..., :1], dtype=torch.float32)
        )
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        values, weight, _ = ctx.saved_tensors
        rows = tuple(range(values.ndim - 1))
        return torch.empty_like(values), None if weight is None else grads[0].sum(rows).to(
            weight.dtype
        )
