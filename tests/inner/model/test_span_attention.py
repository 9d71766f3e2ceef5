"""Attention with a rule for its scores, against one that holds all pairs of positions."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from inner.data.micro_batch import Packing
from inner.model import span_attention
from inner.model.attention import causal_attention
from inner.model.generate import KeyValueCache
from inner.model.span_attention import ScoreRule, alibi_slopes
from tests.inner.sequences import BANDS, Case, Inputs, inputs, with_gradients

SEQ_LEN = 23
RULES = {
    "window": ScoreRule(window=5),
    "window of one": ScoreRule(window=1),
    "cap": ScoreRule(cap=1.5),
    "alibi": ScoreRule(slopes=alibi_slopes(4)),
    "all": ScoreRule(window=7, cap=2.0, slopes=alibi_slopes(4)),
}


def all_pairs(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, packing: Packing | None, rule: ScoreRule
) -> Tensor:
    """The same attention from a matrix of all scores."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if rule.cap is not None:
        scores = rule.cap * (scores / rule.cap).tanh()
    distances = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    if rule.slopes is not None:
        scores = scores - torch.tensor(rule.slopes)[:, None, None] * distances
    is_seen = (distances >= 0) & (distances < (rule.window or q.shape[2]))
    if packing is not None:
        documents = torch.from_numpy(packing.sequences_BT)
        is_seen = is_seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return (scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1) @ v).transpose(1, 2)


def given_inputs(
    has_documents: bool, num_kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> Inputs:
    made = inputs(Case("ring", num_kv_heads, has_documents, dtype), SEQ_LEN)
    q, k, v, dy = (x.to(dtype) for x in made[:4])
    return Inputs(q, k, v, dy, made.packing)


@pytest.mark.parametrize("chunk", [256, 4])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_values_and_gradients_equal_those_of_all_pairs(monkeypatch, rule, has_documents, chunk):
    monkeypatch.setattr(span_attention, "CHUNK", chunk)
    given = given_inputs(has_documents)
    got = with_gradients(lambda *tensors: causal_attention(*tensors, rule), given)
    wanted = with_gradients(lambda *tensors: all_pairs(*tensors, rule), given)
    for mine, theirs in zip(got, wanted, strict=True):
        # Queries and keys have no gradient where a position sees itself alone.
        size = theirs.abs().max().clamp(min=0.1)
        assert float((mine - theirs).abs().max() / size) < BANDS[torch.float32]


def test_a_window_of_the_whole_sequence_changes_no_bit():
    given = given_inputs(has_documents=True)
    plain = causal_attention(given.q, given.k, given.v, given.packing)
    assert torch.equal(
        causal_attention(*given[:3], given.packing, ScoreRule(window=SEQ_LEN)), plain
    )


def test_keys_outside_of_windows_are_not_multiplied(monkeypatch):
    monkeypatch.setattr(span_attention, "CHUNK", 4)
    positions = torch.arange(SEQ_LEN)
    spans = span_attention.build_spans(positions, positions, None, 5)
    numbers = [
        chunk.keys.stop - chunk.keys.start
        for chunk in span_attention._chunks(spans, torch.device("cpu"))
    ]
    assert max(numbers) == 4 + 5 - 1


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_cache_computes_the_same_one_position_at_a_time(rule):
    given = given_inputs(has_documents=False)
    expected = causal_attention(given.q, given.k, given.v, None, rule)
    cache = KeyValueCache(SEQ_LEN)
    parts = [slice(0, 9), *(slice(at, at + 1) for at in range(9, SEQ_LEN))]
    found = torch.cat(
        [cache(*(x[:, part] for x in given[:3]), None, rule) for part in parts], dim=1
    )
    assert float((found - expected).abs().max()) < 1e-5


def test_slopes_are_those_of_the_paper():
    assert alibi_slopes(8) == tuple(2.0**-power for power in range(1, 9))
    assert alibi_slopes(6) == (*(2.0 ** (-2 * power) for power in range(1, 5)), 2.0**-1, 2.0**-3)


def test_a_packing_knows_where_documents_begin():
    made = inputs(Case("ring", 2, True, torch.float32), SEQ_LEN).packing
    assert made is not None
    for row, documents in enumerate(made.sequences_BT):
        assert made.starts_BT[row].tolist() == [
            int(np.searchsorted(documents, each)) for each in documents
        ]
