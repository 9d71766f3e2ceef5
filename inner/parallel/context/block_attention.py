"""Exact causal attention computed block by block. Blocks are merged by their log-sum-exp.

A KeyExchange (ring.py, all_gather.py) brings keys to a rank's queries, and gradients back to the
rank of the keys. Every rank knows the documents of all keys. Shape suffixes are those of
inner.model.attention_kernels. Kernels order dimensions as B, H, S, the model as B, S, H.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from inner.data.micro_batch import Packing
from inner.model.attention_kernels import (
    AttentionOutput,
    dense_backward,
    dense_forward,
    varlen_backward,
    varlen_forward,
)
from inner.model.span_attention import ScoreRule, Spans, build_spans, span_backward, span_forward


class KeyBlock(NamedTuple):
    """Keys and values of some positions, and the document numbers of these positions, which stay on
    the host.
    """

    kv_2BTKE: Tensor
    documents_BT: np.ndarray | None
    """None without a packing. Not read if the keys are the rank's own."""
    positions_T: np.ndarray
    """Positions of the keys in the whole sequence."""

    def at(self, span: slice) -> "KeyBlock":
        documents_BT = None if self.documents_BT is None else self.documents_BT[:, span]
        return KeyBlock(self.kv_2BTKE[:, :, span], documents_BT, self.positions_T[span])


class QueryBlock(NamedTuple):
    """Queries of some positions, the document numbers of these positions, and the attention
    accumulated so far.
    """

    q_BHSE: Tensor
    documents_BS: np.ndarray | None
    output: AttentionOutput

    def at(self, span: slice, rows: slice = slice(None)) -> "QueryBlock":
        """Return the block at a range of positions, for all sequences or for `rows`."""
        documents_BS = None if self.documents_BS is None else self.documents_BS[rows, span]
        output = AttentionOutput(
            self.output.out_BHSE[rows, :, span], self.output.lse_BHS[rows, :, span]
        )
        return QueryBlock(self.q_BHSE[rows, :, span], documents_BS, output)


class ScoreBlock(NamedTuple):
    """A rectangle of scores: a range of the rank's queries and the range of keys that they see."""

    queries: slice
    keys: KeyBlock
    span: slice
    """The range of `keys` that the queries see."""
    is_own: bool
    """Whether the keys are the rank's own, so that attention is causal. In other blocks all keys
    come before all queries, and each query sees the keys of its own document."""


class KeyGradients(Protocol):
    """Sums the gradients of each rank's keys and values over all ranks, in at least fp32."""

    def add(self, block: ScoreBlock, dkv_2BTKE: Tensor) -> None:
        """Add the gradients of a block's keys, which are not the rank's own. Call it in the order
        of the blocks.
        """
        ...

    def collect(self) -> Tensor:
        """Return the sum over the other ranks for this rank's keys, (2, B, S, K, E). Every rank
        must call it, at the end.
        """
        ...


class KeyExchange(Protocol):
    """Brings the keys of all ranks of a group to each rank. Every rank must exhaust `blocks`."""

    def blocks(self, kv_2BSKE: Tensor, packing: Packing | None) -> Iterator[ScoreBlock]:
        """Yield the blocks of scores that this rank computes, first the block of its own keys
        `kv_2BSKE`, which is contiguous.

        In the first block each query sees at least its own key, so it has a finite log-sum-exp
        before later blocks.
        """
        ...

    @property
    def num_ranks(self) -> int: ...

    def positions_at(self, num_positions: int) -> np.ndarray:
        """Return the positions in the whole sequence of the rank's own ones."""
        ...

    def gradients(self, own_2BSKE: Tensor) -> KeyGradients:
        """Create the sums for keys and values with the shape and dtype of `own_2BSKE`."""
        ...


def block_attention(
    q_BSHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    packing: Packing | None = None,
    rule: ScoreRule | None = None,
    *,
    exchange: KeyExchange,
) -> Tensor:
    """Compute `causal_attention` of the whole sequence at this rank's positions. All ranks must
    call it in the same order.

    Only the rank's own positions are kept for the backward, which exchanges keys and values again.
    """
    rule = None if rule is None else rule.at(q_BSHE.shape[1] * exchange.num_ranks)
    y_BSHE = _BlockAttention.apply(q_BSHE, k_BSKE, v_BSKE, packing, exchange, rule)
    assert isinstance(y_BSHE, Tensor)
    return y_BSHE


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        packing: Packing | None,
        exchange: KeyExchange,
        rule: ScoreRule | None,
    ) -> Tensor:
        kv_2BSKE = torch.stack((k_BSKE, v_BSKE))
        queries = _build_queries(q_BSHE, packing)
        for block in exchange.blocks(kv_2BSKE, packing):
            if rule is None:
                _accumulate(queries.at(block.queries), block, packing)
            else:
                spanned = SpanBlock(block, packing, exchange.positions_at(q_BSHE.shape[1]), rule)
                _merge(queries.at(block.queries).output, spanned.forward(queries))
        y_BSHE = queries.output.out_BHSE.to(q_BSHE.dtype).transpose(1, 2)
        ctx.exchange = exchange
        ctx.packing = packing
        ctx.rule = rule
        ctx.save_for_backward(q_BSHE, kv_2BSKE, y_BSHE, queries.output.lse_BHS)
        return y_BSHE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHE, kv_2BSKE, y_BSHE, lse_BHS = ctx.saved_tensors
        packing = ctx.packing
        output = AttentionOutput(y_BSHE.transpose(1, 2), lse_BHS)
        queries = QueryBlock(
            q_BSHE.transpose(1, 2), None if packing is None else packing.documents_BS, output
        )
        grad_BHSE = grads[0].contiguous().transpose(1, 2)
        dq_BHSE = torch.zeros_like(queries.q_BHSE, dtype=lse_BHS.dtype)
        own_2BSKE = torch.zeros_like(kv_2BSKE, dtype=lse_BHS.dtype)
        others = ctx.exchange.gradients(own_2BSKE)
        for block in ctx.exchange.blocks(kv_2BSKE, packing):
            here = (
                queries.at(block.queries),
                grad_BHSE[:, :, block.queries],
                dq_BHSE[:, :, block.queries],
            )
            if ctx.rule is not None:
                spanned = SpanBlock(
                    block, packing, ctx.exchange.positions_at(q_BSHE.shape[1]), ctx.rule
                )
                dkv_2BTKE = spanned.gradients(queries, grad_BHSE, dq_BHSE)
                if block.is_own:
                    own_2BSKE += dkv_2BTKE
                else:
                    others.add(block, dkv_2BTKE)
            elif block.is_own:
                own_2BSKE += _own_gradients(*here, block.keys.kv_2BTKE, packing)
            else:
                others.add(block, _gradients(*here, block.keys.at(block.span), lse_BHS.dtype))
        own_2BSKE += others.collect()
        dk_BSKE, dv_BSKE = own_2BSKE.to(kv_2BSKE.dtype)
        return dq_BHSE.transpose(1, 2).to(q_BSHE.dtype), dk_BSKE, dv_BSKE, None, None, None


@dataclass(frozen=True)
class SpanBlock:
    """A block of scores with a rule, which says by positions which keys each query sees."""

    block: ScoreBlock
    packing: Packing | None
    positions_S: np.ndarray
    """Positions of all queries of the rank."""
    rule: ScoreRule

    @property
    def keys(self) -> KeyBlock:
        return self.block.keys.at(self.block.span)

    @property
    def spans(self) -> Spans:
        positions_S = torch.from_numpy(self.positions_S[self.block.queries])
        starts_BT = None if self.packing is None else self.packing.starts_BT
        return build_spans(
            positions_S, torch.from_numpy(self.keys.positions_T), starts_BT, self.rule.window
        )

    def forward(self, queries: QueryBlock) -> AttentionOutput:
        """Return the attention of the block's queries to its keys."""
        k_BKTE, v_BKTE = self.keys.kv_2BTKE.transpose(2, 3)
        q_BHSE = queries.at(self.block.queries).q_BHSE
        return AttentionOutput(*span_forward(q_BHSE, k_BKTE, v_BKTE, self.spans, self.rule))

    def gradients(self, queries: QueryBlock, grad_BHSE: Tensor, dq_BHSE: Tensor) -> Tensor:
        """Add to `dq_BHSE` of all queries of the rank, and return what the block adds to the keys'
        gradients, dkv_2BTKE.
        """
        mine = queries.at(self.block.queries)
        k_BKTE, v_BKTE = self.keys.kv_2BTKE.transpose(2, 3)
        inputs = mine.q_BHSE, k_BKTE, v_BKTE
        grad_BHSE = grad_BHSE[:, :, self.block.queries]
        dq, *dkv = span_backward(grad_BHSE, inputs, mine.output, self.spans, self.rule)
        dq_BHSE[:, :, self.block.queries] += dq
        return torch.stack(dkv).transpose(2, 3)


def _build_queries(q_BSHE: Tensor, packing: Packing | None) -> QueryBlock:
    """Build a block of queries without any attention yet. Attention accumulates in at least
    fp32.
    """
    q_BHSE = q_BSHE.transpose(1, 2)
    dtype = torch.promote_types(q_BSHE.dtype, torch.float32)
    lse_BHS = torch.full(q_BHSE.shape[:3], -torch.inf, dtype=dtype, device=q_BSHE.device)
    output = AttentionOutput(torch.zeros_like(q_BHSE, dtype=dtype), lse_BHS)
    return QueryBlock(q_BHSE, None if packing is None else packing.documents_BS, output)


def _accumulate(queries: QueryBlock, block: ScoreBlock, packing: Packing | None) -> None:
    """Merge attention to a block's keys into the attention that the queries have accumulated, in
    place.
    """
    if block.is_own:
        _merge(queries.output, _own_attention(queries.q_BHSE, block.keys.kv_2BTKE, packing))
        return
    keys = block.keys.at(block.span)
    for part in _visible_parts(queries, keys):
        mine = queries.at(part.queries, part.rows)
        _merge(mine.output, dense_forward(mine.q_BHSE, *part.keys_of(keys), is_causal=False))


def _merge(accumulated: AttentionOutput, new: AttentionOutput) -> None:
    out_BHSE, lse_BHS = accumulated
    total_BHS = torch.logaddexp(lse_BHS, new.lse_BHS)
    out_BHSE.mul_((lse_BHS - total_BHS).exp().unsqueeze(-1))
    out_BHSE.add_(new.out_BHSE * (new.lse_BHS - total_BHS).exp().unsqueeze(-1))
    lse_BHS.copy_(total_BHS)


def _gradients(
    queries: QueryBlock, grad_BHSE: Tensor, dq_BHSE: Tensor, keys: KeyBlock, dtype: torch.dtype
) -> Tensor:
    """Add a block's contribution to `dq_BHSE`, and return its contribution to the keys' gradients,
    dkv_2BTKE in `dtype`.

    The queries must hold their complete attention, in their own dtype.
    """
    dkv_2BTKE = torch.zeros_like(keys.kv_2BTKE, dtype=dtype)
    for part in _visible_parts(queries, keys):
        mine = queries.at(part.queries, part.rows)
        grad = grad_BHSE[part.rows, :, part.queries]
        dq, *dkv = dense_backward(
            grad, mine.q_BHSE, *part.keys_of(keys), mine.output, is_causal=False
        )
        dq_BHSE[part.rows, :, part.queries] += dq
        dkv_2BTKE[:, part.rows, part.keys] = torch.stack(dkv).transpose(2, 3).to(dtype)
    return dkv_2BTKE


class _Part(NamedTuple):
    """Queries and keys of some sequences, all of which see each other."""

    rows: slice
    queries: slice
    keys: slice

    def keys_of(self, block: KeyBlock) -> tuple[Tensor, Tensor]:
        k_BKTE, v_BKTE = block.kv_2BTKE[:, self.rows, self.keys].transpose(2, 3)
        return k_BKTE, v_BKTE


def _visible_parts(queries: QueryBlock, keys: KeyBlock) -> Iterator[_Part]:
    """Yield the parts of a block in which queries see keys, if all of its keys come before all of
    its queries.

    A sequence has at most one such part: the document of its last key, if its first query is in the
    same document.
    """
    if queries.documents_BS is None or keys.documents_BT is None:
        yield _Part(slice(None), slice(None), slice(None))
        return
    for row, (of_queries, of_keys) in enumerate(
        zip(queries.documents_BS, keys.documents_BT, strict=True)
    ):
        if of_queries[0] == of_keys[-1]:
            num_queries = int(np.searchsorted(of_queries, of_keys[-1], side="right"))
            first_key = int(np.searchsorted(of_keys, of_queries[0]))
            yield _Part(slice(row, row + 1), slice(0, num_queries), slice(first_key, None))


def _own_attention(q_BHSE: Tensor, kv_2BSKE: Tensor, packing: Packing | None) -> AttentionOutput:
    """Compute causal attention to the rank's own keys. The positions of a document that the rank
    holds are contiguous.
    """
    k_BSKE, v_BSKE = kv_2BSKE
    if packing is None:
        return dense_forward(q_BHSE, k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2), is_causal=True)
    B, _, S, _ = q_BHSE.shape
    flat = [x.flatten(0, 1) for x in (q_BHSE.transpose(1, 2), k_BSKE, v_BSKE)]
    out_MHE, lse_HM = varlen_forward(
        *flat, packing.bounds_N, packing.host_bounds_N, packing.longest
    )
    return AttentionOutput(
        out_MHE.unflatten(0, (B, S)).transpose(1, 2), lse_HM.unflatten(1, (B, S)).transpose(0, 1)
    )


def _own_gradients(
    queries: QueryBlock,
    grad_BHSE: Tensor,
    dq_BHSE: Tensor,
    kv_2BSKE: Tensor,
    packing: Packing | None,
) -> Tensor:
    """Like `_gradients`, but for the rank's own keys, and in their dtype."""
    k_BSKE, v_BSKE = kv_2BSKE
    if packing is None:
        keys = k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2)
        dq, *dkv = dense_backward(grad_BHSE, queries.q_BHSE, *keys, queries.output, is_causal=True)
        dq_BHSE += dq
        return torch.stack(dkv).transpose(2, 3)
    out_BHSE, lse_BHS = queries.output
    heads_last = (x.transpose(1, 2) for x in (grad_BHSE, queries.q_BHSE))
    flat = [x.flatten(0, 1) for x in (*heads_last, k_BSKE, v_BSKE, out_BHSE.transpose(1, 2))]
    lse_HM = lse_BHS.transpose(0, 1).flatten(1)
    bounds = packing.bounds_N, packing.host_bounds_N, packing.longest
    dq_MHE, *dkv = varlen_backward(*flat, lse_HM, *bounds)
    batch = k_BSKE.shape[:2]
    dq_BHSE += dq_MHE.unflatten(0, batch).transpose(1, 2)
    return torch.stack(dkv).unflatten(1, batch)
