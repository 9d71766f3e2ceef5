"""Queries, keys and values of full sequences, and the expected attention."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inner.config import ContextMethod
from inner.data.micro_batch import Packing, build_packing
from inner.model.attention import causal_attention

B, H, E = 2, 4, 8
BANDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative errors that rounding can explain."""


class Case(NamedTuple):
    method: ContextMethod
    num_kv_heads: int
    has_documents: bool
    dtype: torch.dtype


class Inputs(NamedTuple):
    """A full sequence in fp64, rounded to the case's dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    packing: Packing | None


def inputs(case: Case, seq_len: int) -> Inputs:
    generator = torch.Generator().manual_seed(seq_len)

    def draw(num_heads: int) -> Tensor:
        return torch.randn(B, seq_len, num_heads, E, generator=generator).to(case.dtype).double()

    starts = torch.rand(B, seq_len, generator=generator) < 0.15
    packing = (
        pack_at(starts.long().cumsum(dim=-1).numpy(), torch.arange(seq_len))
        if case.has_documents
        else None
    )
    return Inputs(draw(H), draw(case.num_kv_heads), draw(case.num_kv_heads), draw(H), packing)


def pack_at(sequences_BT: np.ndarray, positions: Tensor) -> Packing:
    return build_packing(sequences_BT, positions.numpy(), torch.device("cpu"))


def strided(x: Tensor) -> Tensor:
    """The same values with dims 0 and 1 swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def dense_mask_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Reference attention with a mask of all pairs of positions."""
    documents = torch.from_numpy(packing.sequences_BT)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True).transpose(
        1, 2
    )


def with_gradients(attend: Callable[..., Tensor], given: Inputs) -> list[Tensor]:
    """(y, dq, dk, dv) of one attention."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    y = attend(*leaves, given.packing)
    return [y.detach(), *torch.autograd.grad(y, leaves, given.dy)]


def expected(given: Inputs) -> list[Tensor]:
    return with_gradients(
        causal_attention if given.packing is None else dense_mask_attention, given
    )


def bytes_per_attention(
    method: ContextMethod,
    q_shape: tuple[int, int, int, int],
    num_kv_heads: int,
    cp: int,
    itemsize: int,
) -> tuple[int, int]:
    """Bytes that a rank sends in one attention, (forward, backward); `q_shape` is (B, S, H, E) of
    the whole sequence.

    With n = B S / cp positions of its own, K key-value heads and gradients in at least fp32, with
    documents or without:

                  forward                                backward
    ring          (cp - 1) 2 n K E                       the same, and (cp - 1) 2 n K E of gradients
    all_gather    as ring                                as ring
    ulysses       (cp - 1) / cp n (2 H + 2 K) E          the same
    """
    B, S, H, E = q_shape
    num_positions = B * S // cp
    if method == "ulysses":
        traded = (cp - 1) * num_positions * (2 * H + 2 * num_kv_heads) * E // cp * itemsize
        return traded, traded
    keys = (cp - 1) * 2 * num_positions * num_kv_heads * E
    return keys * itemsize, keys * (itemsize + max(itemsize, 4))
