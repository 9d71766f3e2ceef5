"""Exact causal attention computed block by block; blocks are merged by their log-sum-exp.

A KeyExchange (ring.py, all_gather.py) brings keys to a rank's queries and gradients back to the rank of the keys.
Shape suffixes are those of inner.model.attention; kernels order dimensions as B, H, S, the model as B, S, H.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from inner.model.attention import AttentionOutput, Mask, attention_bias, kernel_backward, kernel_forward, same_document


class KeyBlock(NamedTuple):
    """Keys and values of some positions with the documents of these positions; ranks send these to each other."""

    kv_2BTKE: Tensor
    documents_BT: Tensor | None

    def at(self, span: slice) -> "KeyBlock":
        documents_BT = None if self.documents_BT is None else self.documents_BT[:, span]
        return KeyBlock(self.kv_2BTKE[:, :, span], documents_BT)


class QueryBlock(NamedTuple):
    """Queries of some positions, the documents of these positions, and the attention accumulated so far."""

    q_BHSE: Tensor
    documents_BS: Tensor | None
    output: AttentionOutput

    def at(self, span: slice) -> "QueryBlock":
        documents_BS = None if self.documents_BS is None else self.documents_BS[:, span]
        output = AttentionOutput(self.output.out_BHSE[:, :, span], self.output.lse_BHS[:, :, span])
        return QueryBlock(self.q_BHSE[:, :, span], documents_BS, output)


class ScoreBlock(NamedTuple):
    """A rectangle of scores: a range of the rank's queries and the range of keys that they see."""

    queries: slice
    keys: KeyBlock
    span: slice
    """The range of `keys`."""
    is_own: bool
    """Whether the keys are the rank's own: then attention is causal. In other blocks all queries see all keys."""


class KeyGradients(Protocol):
    """Sums the gradients of each rank's keys and values over all ranks, in at least fp32."""

    def add(self, block: ScoreBlock, dkv_2BTKE: Tensor) -> None:
        """Add the gradients of a block's keys that are not the rank's own; call it in the order of the blocks."""
        ...

    def collect(self) -> Tensor:
        """Sum over the other ranks for this rank's keys, (2, B, S, K, E). Every rank must call it, at the end."""
        ...


class KeyExchange(Protocol):
    """Brings the keys of all ranks of a group to each rank. Every rank must exhaust `blocks`."""

    def blocks(self, keys: KeyBlock) -> Iterator[ScoreBlock]:
        """Yield the blocks of scores that this rank computes; `keys` are its own, contiguous, and their block is first.

        In that block each query sees at least itself, so no query is without a key in later blocks.
        """
        ...

    def gradients(self, own_2BSKE: Tensor) -> KeyGradients:
        """Create the sums, for keys and values with the shape and dtype of `own_2BSKE`."""
        ...


def block_attention(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents_BS: Tensor | None, *, exchange: KeyExchange
) -> Tensor:
    """`causal_attention` of the whole sequence at this rank's positions. All ranks must call it, in step.

    Only the rank's own positions are kept for the backward, which exchanges keys and values again.
    """
    y_BSHE = _BlockAttention.apply(q_BSHE, k_BSKE, v_BSKE, documents_BS, exchange)
    assert isinstance(y_BSHE, Tensor)
    return y_BSHE


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents_BS: Tensor | None, exchange: KeyExchange
    ) -> Tensor:
        keys = KeyBlock(torch.stack((k_BSKE, v_BSKE)), None if documents_BS is None else documents_BS.contiguous())
        queries = _build_queries(q_BSHE, keys.documents_BT)
        for block in exchange.blocks(keys):
            _accumulate(queries.at(block.queries), block)
        y_BSHE = queries.output.out_BHSE.to(q_BSHE.dtype).transpose(1, 2)
        ctx.exchange = exchange
        ctx.save_for_backward(q_BSHE, *keys, y_BSHE, queries.output.lse_BHS)
        return y_BSHE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHE, kv_2BSKE, documents_BS, y_BSHE, lse_BHS = ctx.saved_tensors
        keys = KeyBlock(kv_2BSKE, documents_BS)
        queries = QueryBlock(q_BSHE.transpose(1, 2), documents_BS, AttentionOutput(y_BSHE.transpose(1, 2), lse_BHS))
        grad_BHSE = grads[0].contiguous().transpose(1, 2)
        dq_BHSE = torch.zeros_like(queries.q_BHSE, dtype=lse_BHS.dtype)
        own_2BSKE = torch.zeros_like(kv_2BSKE, dtype=lse_BHS.dtype)
        others = ctx.exchange.gradients(own_2BSKE)
        for block in ctx.exchange.blocks(keys):
            dq, dkv = _gradients(queries.at(block.queries), block, grad_BHSE[:, :, block.queries])
            dq_BHSE[:, :, block.queries] += dq
            if block.is_own:
                own_2BSKE += dkv
            else:
                others.add(block, dkv)
        own_2BSKE += others.collect()
        dk_BSKE, dv_BSKE = own_2BSKE.to(kv_2BSKE.dtype)
        return dq_BHSE.transpose(1, 2).to(q_BSHE.dtype), dk_BSKE, dv_BSKE, None, None


def _build_queries(q_BSHE: Tensor, documents_BS: Tensor | None) -> QueryBlock:
    """Queries with nothing accumulated yet; attention accumulates in at least fp32."""
    q_BHSE = q_BSHE.transpose(1, 2)
    dtype = torch.promote_types(q_BSHE.dtype, torch.float32)
    lse_BHS = torch.full(q_BHSE.shape[:3], -torch.inf, dtype=dtype, device=q_BSHE.device)
    return QueryBlock(q_BHSE, documents_BS, AttentionOutput(torch.zeros_like(q_BHSE, dtype=dtype), lse_BHS))


def _accumulate(queries: QueryBlock, block: ScoreBlock) -> None:
    """Merge the attention of the queries to a block's keys into what they have accumulated, in place."""
    out_BHSE, lse_BHS = queries.output
    keys = block.keys.at(block.span)
    new = kernel_forward(queries.q_BHSE, keys.kv_2BTKE.transpose(2, 3), _build_mask(queries, keys, block.is_own))
    total_BHS = torch.logaddexp(lse_BHS, new.lse_BHS)
    out_BHSE.mul_((lse_BHS - total_BHS).exp().unsqueeze(-1))
    out_BHSE.add_(new.out_BHSE * (new.lse_BHS - total_BHS).exp().unsqueeze(-1))
    lse_BHS.copy_(total_BHS)


def _gradients(queries: QueryBlock, block: ScoreBlock, grad_BHSE: Tensor) -> tuple[Tensor, Tensor]:
    """Contribution of a block to the gradients: dq_BHSE in the queries' dtype, dkv_2BTKE in that of the log-sum-exp.

    The queries hold their complete attention, in their own dtype.
    """
    keys = block.keys.at(block.span)
    mask = _build_mask(queries, keys, block.is_own)
    kv_2BKTE = keys.kv_2BTKE.transpose(2, 3)
    dq_BHSE, dkv_2BKTE = kernel_backward(grad_BHSE, queries.q_BHSE, kv_2BKTE, queries.output, mask)
    return dq_BHSE, dkv_2BKTE.transpose(2, 3)


def _build_mask(queries: QueryBlock, keys: KeyBlock, is_causal: bool) -> Mask:
    if queries.documents_BS is None or keys.documents_BT is None:
        return Mask(is_causal)
    seen_B1ST = same_document(queries.documents_BS, keys.documents_BT)
    return Mask(False, attention_bias(seen_B1ST.tril() if is_causal else seen_B1ST, queries.q_BHSE.dtype))
