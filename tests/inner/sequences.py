"""Queries, keys and values of full sequences, and the expected attention."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inner.config import ContextMethod
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
    documents: Tensor | None


def inputs(case: Case, seq_len: int) -> Inputs:
    generator = torch.Generator().manual_seed(seq_len)

    def draw(num_heads: int) -> Tensor:
        return torch.randn(B, seq_len, num_heads, E, generator=generator).to(case.dtype).double()

    starts = torch.rand(B, seq_len, generator=generator) < 0.15
    documents = starts.long().cumsum(dim=-1) if case.has_documents else None
    return Inputs(draw(H), draw(case.num_kv_heads), draw(case.num_kv_heads), draw(H), documents)


def strided(x: Tensor) -> Tensor:
    """The same values with dims 0 and 1 swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def each_document_alone(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Reference attention, computed one sequence and one document at a time."""
    rows = []
    for row in range(len(q)):
        lengths = documents[row].unique_consecutive(return_counts=True)[1].tolist()
        pieces = zip(*(x[row].split(lengths) for x in (q, k, v)), strict=True)
        rows.append(torch.cat([causal_attention(*(x[None] for x in piece))[0] for piece in pieces]))
    return torch.stack(rows)


def with_gradients(attend: Callable[..., Tensor], given: Inputs) -> list[Tensor]:
    """(y, dq, dk, dv) of one attention."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    y = attend(*leaves, given.documents)
    return [y.detach(), *torch.autograd.grad(y, leaves, given.dy)]


def expected(given: Inputs) -> list[Tensor]:
    return with_gradients(causal_attention if given.documents is None else each_document_alone, given)


def bytes_per_attention(
    method: ContextMethod,
    q_shape: tuple[int, int, int, int],
    num_kv_heads: int,
    cp: int,
    itemsize: int,
    *,
    has_documents: bool = False,
) -> tuple[int, int]:
    """Bytes that a rank sends in one attention, (forward, backward); `q_shape` is (B, S, H, E) of the whole sequence.

    With n = B S / cp positions of its own, K key-value heads and gradients in at least fp32:

                  forward                                backward
    ring          (cp - 1) 2 n K E                       the same, and (cp - 1) 2 n K E of gradients
    all_gather    as ring                                as ring
    ulysses       (cp - 1) / cp n (2 H + 2 K) E          the same
    """
    B, S, H, E = q_shape
    num_positions = B * S // cp
    # Document numbers are int64 and travel with the keys.
    documents = (cp - 1) * num_positions * 8 if has_documents else 0
    if method == "ulysses":
        traded = (cp - 1) * num_positions * (2 * H + 2 * num_kv_heads) * E // cp * itemsize
        return traded + documents, traded
    keys = (cp - 1) * 2 * num_positions * num_kv_heads * E
    return keys * itemsize + documents, keys * (itemsize + max(itemsize, 4)) + documents
