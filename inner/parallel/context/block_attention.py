"""Exact causal attention from blocks: some queries and some keys at a time, merged by their log-sum-exp.

How keys come to a rank's queries, and gradients back to the keys' rank, is an Exchange: ring.py, all_gather.py.
Shape suffixes as in inner.attention; B, H, S is the kernels' order of dims, B, S, H the model's.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from inner.attention import Found, Mask, bias_of, kernel_backward, kernel_forward, same_document


class Keys(NamedTuple):
    """Keys and values of some positions, and the positions' documents: what ranks give one another."""

    kv_2BTKE: Tensor
    documents_BT: Tensor | None

    def at(self, span: slice) -> "Keys":
        documents_BT = None if self.documents_BT is None else self.documents_BT[:, span]
        return Keys(self.kv_2BTKE[:, :, span], documents_BT)


class Queries(NamedTuple):
    """Queries of some positions, the positions' documents, and what they have found so far."""

    q_BHSE: Tensor
    documents_BS: Tensor | None
    found: Found

    def at(self, span: slice) -> "Queries":
        documents_BS = None if self.documents_BS is None else self.documents_BS[:, span]
        found = Found(self.found.out_BHSE[:, :, span], self.found.lse_BHS[:, :, span])
        return Queries(self.q_BHSE[:, :, span], documents_BS, found)


class Step(NamedTuple):
    """A rectangle of scores: which of a rank's queries see which of these keys."""

    queries: slice
    keys: Keys
    span: slice
    """Of `keys`."""
    is_own: bool
    """The rank's own positions: each sees those up to itself. Elsewhere all see all."""


class KeyGradients(Protocol):
    """Adds up what all ranks find for the gradients of each rank's keys and values, in at least fp32."""

    def add(self, step: Step, dkv_2BTKE: Tensor) -> None:
        """Takes the gradients of the keys of a step that is not the rank's own, in the order of the steps."""
        ...

    def collect(self) -> Tensor:
        """What the other ranks found for this rank's keys, (2, B, S, K, E). Every rank must call it, at the end."""
        ...


class Exchange(Protocol):
    """How the ranks of a group see each other's keys. Every rank must go through all steps."""

    def steps(self, keys: Keys) -> Iterator[Step]:
        """What this rank's queries see; `keys` are its own, contiguous, and their step comes first.

        There each query sees at least itself, so that in later steps none is without any key.
        """
        ...

    def gradients(self, own_2BSKE: Tensor) -> KeyGradients:
        """For keys and values of the shape of `own_2BSKE`; sums have its dtype."""
        ...


def block_attention(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents_BS: Tensor | None, *, exchange: Exchange
) -> Tensor:
    """`causal_attention` of the whole sequence at this rank's positions. All ranks must call it, in step.

    Only a rank's own positions are kept for the backward; there keys and values are exchanged once more.
    """
    y_BSHE = _BlockAttention.apply(q_BSHE, k_BSKE, v_BSKE, documents_BS, exchange)
    assert isinstance(y_BSHE, Tensor)
    return y_BSHE


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents_BS: Tensor | None, exchange: Exchange
    ) -> Tensor:
        keys = Keys(torch.stack((k_BSKE, v_BSKE)), None if documents_BS is None else documents_BS.contiguous())
        queries = _ask(q_BSHE, keys.documents_BT)
        for step in exchange.steps(keys):
            _look(queries.at(step.queries), step)
        y_BSHE = queries.found.out_BHSE.to(q_BSHE.dtype).transpose(1, 2)
        ctx.exchange = exchange
        ctx.save_for_backward(q_BSHE, *keys, y_BSHE, queries.found.lse_BHS)
        return y_BSHE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHE, kv_2BSKE, documents_BS, y_BSHE, lse_BHS = ctx.saved_tensors
        keys = Keys(kv_2BSKE, documents_BS)
        queries = Queries(q_BSHE.transpose(1, 2), documents_BS, Found(y_BSHE.transpose(1, 2), lse_BHS))
        grad_BHSE = grads[0].contiguous().transpose(1, 2)
        dq_BHSE = torch.zeros_like(queries.q_BHSE, dtype=lse_BHS.dtype)
        own_2BSKE = torch.zeros_like(kv_2BSKE, dtype=lse_BHS.dtype)
        others = ctx.exchange.gradients(own_2BSKE)
        for step in ctx.exchange.steps(keys):
            dq, dkv = _look_back(queries.at(step.queries), step, grad_BHSE[:, :, step.queries])
            dq_BHSE[:, :, step.queries] += dq
            if step.is_own:
                own_2BSKE += dkv
            else:
                others.add(step, dkv)
        own_2BSKE += others.collect()
        dk_BSKE, dv_BSKE = own_2BSKE.to(kv_2BSKE.dtype)
        return dq_BHSE.transpose(1, 2).to(q_BSHE.dtype), dk_BSKE, dv_BSKE, None, None


def _ask(q_BSHE: Tensor, documents_BS: Tensor | None) -> Queries:
    """Queries that have found nothing yet; what they find adds up in at least fp32."""
    q_BHSE = q_BSHE.transpose(1, 2)
    dtype = torch.promote_types(q_BSHE.dtype, torch.float32)
    lse_BHS = torch.full(q_BHSE.shape[:3], -torch.inf, dtype=dtype, device=q_BSHE.device)
    return Queries(q_BHSE, documents_BS, Found(torch.zeros_like(q_BHSE, dtype=dtype), lse_BHS))


def _look(queries: Queries, step: Step) -> None:
    """Merges what the queries find in a step's keys into what they have found, in place."""
    out_BHSE, lse_BHS = queries.found
    keys = step.keys.at(step.span)
    found = kernel_forward(queries.q_BHSE, keys.kv_2BTKE.transpose(2, 3), _mask(queries, keys, step.is_own))
    total_BHS = torch.logaddexp(lse_BHS, found.lse_BHS)
    out_BHSE.mul_((lse_BHS - total_BHS).exp().unsqueeze(-1))
    out_BHSE.add_(found.out_BHSE * (found.lse_BHS - total_BHS).exp().unsqueeze(-1))
    lse_BHS.copy_(total_BHS)


def _look_back(queries: Queries, step: Step, grad_BHSE: Tensor) -> tuple[Tensor, Tensor]:
    """What a step adds to the gradients: dq_BHSE in the queries' dtype, dkv_2BTKE in that of the log-sum-exp.

    The queries have found all, and hold the attention in their own dtype.
    """
    keys = step.keys.at(step.span)
    mask = _mask(queries, keys, step.is_own)
    kv_2BKTE = keys.kv_2BTKE.transpose(2, 3)
    dq_BHSE, dkv_2BKTE = kernel_backward(grad_BHSE, queries.q_BHSE, kv_2BKTE, queries.found, mask)
    return dq_BHSE, dkv_2BKTE.transpose(2, 3)


def _mask(queries: Queries, keys: Keys, is_causal: bool) -> Mask:
    if queries.documents_BS is None or keys.documents_BT is None:
        return Mask(is_causal)
    seen_B1ST = same_document(queries.documents_BS, keys.documents_BT)
    return Mask(False, bias_of(seen_B1ST.tril() if is_causal else seen_B1ST, queries.q_BHSE.dtype))
