"""Attention with a rule for its scores: a sliding window, a soft cap, ALiBi.

    score of query i and key j = cap tanh(q_i k_j / (sqrt(E) cap)) - slope (i - j)
    for first_i <= j <= i

The first key that a query sees is that of its document or of its window. Scores of some queries
exist at a time, and only with keys that one of them sees, so neither memory nor work grow with
pairs outside of windows.

Shape suffixes: B sequences, S positions of the queries, T of the keys, H heads, K key-value heads,
G = H / K, E head size, C queries of a chunk, W keys that they see.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inner.model.sizes import ModelSizes

CHUNK = 256
"""Number of queries whose scores exist at a time."""


@dataclass(frozen=True)
class ScoreRule:
    """What changes the scores of an attention, beside causality and documents."""

    window: int | None = None
    """Number of positions that a query sees, its own among them. None: all before it."""
    cap: float | None = None
    """Soft cap of scores."""
    slopes: tuple[float, ...] | None = None
    """ALiBi's factor of the distance for each head."""

    def at(self, length: int) -> "ScoreRule | None":
        """Return the rule for sequences of this length; None if it changes nothing there."""
        window = self.window if self.window is not None and self.window < length else None
        if window is None and self.cap is None and self.slopes is None:
            return None
        return ScoreRule(window, self.cap, self.slopes)

    def of_heads(self, heads: slice) -> "ScoreRule":
        """Return the rule for some of the heads."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[heads])


NO_RULE = ScoreRule()


def build_rule(sizes: ModelSizes, layer: int) -> ScoreRule | None:
    """Return the rule of a layer's scores, or None if it has none."""
    decoder = sizes.decoder
    slopes = alibi_slopes(sizes.num_heads) if decoder.positions == "alibi" else None
    rule = ScoreRule(decoder.window_of(layer), decoder.score_cap, slopes)
    return None if rule == NO_RULE else rule


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes: 2^(-8 / n), 2^(-16 / n), ... for n heads, if n is a power of two
    (2108.12409, section 3).

    Otherwise they are those of the next smaller power of two n, and then every second one of 2 n.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (head + 1) / whole) for head in range(whole)]
    others = [2.0 ** (-4.0 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return tuple(first + others)


class Spans(NamedTuple):
    """Which keys queries see, by positions in the whole sequence; int64 on the CPU."""

    positions_S: Tensor
    """Positions of the queries, rising."""
    first_BS: Tensor
    """The first position that each query sees."""
    keys_T: Tensor
    """Positions of the keys, rising."""

    def of_queries(self, queries: slice) -> "Spans":
        return Spans(self.positions_S[queries], self.first_BS[:, queries], self.keys_T)


def build_spans(
    positions_S: Tensor, keys_T: Tensor, starts_BT: Tensor | None, window: int | None
) -> Spans:
    """Return what queries at some positions see. `starts_BT`: where the document of each position
    of the whole sequence begins; None: documents are ignored. Then B is 1.
    """
    first_BS = (
        torch.zeros_like(positions_S)[None] if starts_BT is None else starts_BT[:, positions_S]
    )
    if window is not None:
        first_BS = torch.maximum(first_BS, positions_S - window + 1)
    return Spans(positions_S, first_BS, keys_T)


class _Chunk(NamedTuple):
    """Some queries, and the keys between the first and the last that they see."""

    queries: slice
    keys: slice
    is_hidden_BCW: Tensor
    """Which keys each query does not see, on the device."""
    distances_CW: Tensor
    """Fp32, on the device."""


def _chunks(spans: Spans, device: torch.device) -> Iterator[_Chunk]:
    for begin in range(0, len(spans.positions_S), CHUNK):
        queries = slice(begin, begin + CHUNK)
        positions_C, first_BC, keys_T = spans.of_queries(queries)
        ends = torch.stack((first_BC.min(), positions_C[-1] + 1))
        keys = slice(*torch.searchsorted(keys_T, ends).tolist())
        if keys.start >= keys.stop:
            continue
        seen_W = keys_T[keys]
        distances_CW = positions_C[:, None] - seen_W
        is_hidden_BCW = (distances_CW < 0) | (seen_W < first_BC[:, :, None])
        yield _Chunk(queries, keys, is_hidden_BCW.to(device), distances_CW.float().to(device))


def span_forward(
    q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, spans: Spans, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Return attention out_BHSE to these keys, and the log-sum-exp of the scores lse_BHS in at
    least fp32. Where a query sees none of the keys they are 0 and minus infinity.
    """
    out_BHSE = torch.zeros_like(q_BHSE)
    lse_BHS = q_BHSE.new_full(
        q_BHSE.shape[:3], -torch.inf, dtype=torch.promote_types(q_BHSE.dtype, torch.float32)
    )
    for chunk in _chunks(spans, q_BHSE.device):
        scores_BKGCW, _ = _scores(
            q_BHSE[:, :, chunk.queries], k_BKTE[:, :, chunk.keys], chunk, rule
        )
        lse_BKGC = scores_BKGCW.logsumexp(dim=-1)
        # A query that sees none of the keys has weights of 0, and not of exp(inf - inf).
        weights_BKGCW = (scores_BKGCW - lse_BKGC.nan_to_num(neginf=0.0)[..., None]).exp()
        values_BKGCE = weights_BKGCW.to(v_BKTE.dtype) @ v_BKTE[:, :, None, chunk.keys]
        out_BHSE[:, :, chunk.queries] = values_BKGCE.flatten(1, 2)
        lse_BHS[:, :, chunk.queries] = lse_BKGC.flatten(1, 2)
    return out_BHSE, lse_BHS


def span_backward(
    grad_BHSE: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    output: tuple[Tensor, Tensor],
    spans: Spans,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients dq_BHSE, dk_BKTE and dv_BKTE through these keys, the last two in at
    least fp32.

    `inputs`: as of the forward. `output`: the attention to all keys that the queries see, not only
    to these.
    """
    q_BHSE, k_BKTE, v_BKTE = inputs
    out_BHSE, lse_BHS = output
    dq_BHSE = torch.zeros_like(q_BHSE)
    dk_BKTE, dv_BKTE = (torch.zeros_like(x, dtype=lse_BHS.dtype) for x in (k_BKTE, v_BKTE))
    sums_BHS = (grad_BHSE.to(lse_BHS.dtype) * out_BHSE).sum(dim=-1)
    groups = k_BKTE.shape[1], -1
    for chunk in _chunks(spans, q_BHSE.device):
        q_BHCE = q_BHSE[:, :, chunk.queries]
        keys_BKWE = k_BKTE[:, :, chunk.keys]
        scores_BKGCW, slope_BKGCW = _scores(q_BHCE, keys_BKWE, chunk, rule)
        lse_BKGC, sums_BKGC = (
            x[:, :, chunk.queries].unflatten(1, groups) for x in (lse_BHS, sums_BHS)
        )
        weights_BKGCW = (scores_BKGCW - lse_BKGC[..., None]).exp()
        grad_BKGCE = grad_BHSE[:, :, chunk.queries].unflatten(1, groups)
        d_weights_BKGCW = grad_BKGCE @ v_BKTE[:, :, None, chunk.keys].transpose(-2, -1)
        d_scores_BKGCW = weights_BKGCW * (d_weights_BKGCW - sums_BKGC[..., None]) * slope_BKGCW
        d_scores_BKGCW = d_scores_BKGCW.to(q_BHSE.dtype)
        dq_BHSE[:, :, chunk.queries] = (d_scores_BKGCW @ keys_BKWE[:, :, None]).flatten(1, 2)
        dk_BKTE[:, :, chunk.keys] += _over_queries(d_scores_BKGCW, q_BHCE.unflatten(1, groups))
        dv_BKTE[:, :, chunk.keys] += _over_queries(weights_BKGCW.to(grad_BKGCE.dtype), grad_BKGCE)
    scale = 1.0 / math.sqrt(q_BHSE.shape[-1])
    return dq_BHSE * scale, dk_BKTE * scale, dv_BKTE


def _scores(
    q_BHCE: Tensor, k_BKWE: Tensor, chunk: _Chunk, rule: ScoreRule
) -> tuple[Tensor, Tensor | float]:
    """Return the scores (B, K, G, C, W) in at least fp32, minus infinity where a query does not see
    a key, and their derivatives by the products of queries and keys.
    """
    num_kv_heads = k_BKWE.shape[1]
    products_BKGCW = q_BHCE.unflatten(1, (num_kv_heads, -1)) @ k_BKWE[:, :, None].transpose(-2, -1)
    scores_BKGCW = products_BKGCW.to(torch.promote_types(q_BHCE.dtype, torch.float32)) / math.sqrt(
        q_BHCE.shape[-1]
    )
    slope_BKGCW = 1.0
    if rule.cap is not None:
        bent_BKGCW = (scores_BKGCW / rule.cap).tanh()
        scores_BKGCW = rule.cap * bent_BKGCW
        slope_BKGCW = 1.0 - bent_BKGCW.square()
    if rule.slopes is not None:
        slopes_H = torch.tensor(rule.slopes, device=q_BHCE.device)
        scores_BKGCW = scores_BKGCW - slopes_H.view(num_kv_heads, -1, 1, 1) * chunk.distances_CW
    return scores_BKGCW.masked_fill(chunk.is_hidden_BCW[:, None, None], -torch.inf), slope_BKGCW


def _over_queries(left_BKGCW: Tensor, right_BKGCE: Tensor) -> Tensor:
    """Return the sum over the heads of a group, and over queries, of left^T right: (B, K, W, E)."""
    return left_BKGCW.flatten(2, 3).transpose(-2, -1) @ right_BKGCE.flatten(2, 3)


@torch.library.custom_op("inner::span_attention", mutates_args=())
def span_attention(
    q_BHSE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    starts_BT: Tensor | None,
    window: int | None,
    cap: float | None,
    slopes: list[float] | None,
) -> tuple[Tensor, Tensor]:
    """Return out_BHSE and lse_BHS of causal attention of whole sequences by a rule. Differentiable.
    `starts_BT`: see build_spans.

    This is a custom operator, so that torch.compile, recomputation and a dry run see one step.
    """
    positions_S = torch.arange(q_BHSE.shape[2])
    spans = build_spans(positions_S, positions_S, starts_BT, window)
    return span_forward(q_BHSE, k_BKTE, v_BKTE, spans, _rule(window, cap, slopes))


@torch.library.custom_op("inner::span_attention_backward", mutates_args=())
def span_attention_backward(
    grad_BHSE: Tensor,
    q_BHSE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    out_BHSE: Tensor,
    lse_BHS: Tensor,
    starts_BT: Tensor | None,
    window: int | None,
    cap: float | None,
    slopes: list[float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients dq_BHSE, dk_BKTE and dv_BKTE, in the dtype of the inputs."""
    positions_S = torch.arange(q_BHSE.shape[2])
    spans = build_spans(positions_S, positions_S, starts_BT, window)
    inputs = q_BHSE, k_BKTE, v_BKTE
    rule = _rule(window, cap, slopes)
    dq_BHSE, dk_BKTE, dv_BKTE = span_backward(grad_BHSE, inputs, (out_BHSE, lse_BHS), spans, rule)
    return dq_BHSE, dk_BKTE.to(k_BKTE.dtype), dv_BKTE.to(v_BKTE.dtype)


SPAN_OPERATOR = torch.ops.inner.span_attention.default


def _rule(window: int | None, cap: float | None, slopes: list[float] | None) -> ScoreRule:
    return ScoreRule(window, cap, None if slopes is None else tuple(slopes))


@span_attention.register_fake
def _fake_forward(q_BHSE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q_BHSE.dtype, torch.float32)
    return torch.empty_like(q_BHSE), q_BHSE.new_empty(q_BHSE.shape[:3], dtype=dtype)


@span_attention_backward.register_fake
def _fake_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BHSE, k_BKTE, v_BKTE, ctx.starts_BT, *ctx.rule = inputs
    ctx.save_for_backward(q_BHSE, k_BKTE, v_BKTE, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_BHSE: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = span_attention_backward(grad_BHSE, *ctx.saved_tensors, ctx.starts_BT, *ctx.rule)
    return *gradients, None, None, None, None


span_attention.register_autograd(_differentiate, setup_context=_keep_for_backward)
