"""Bigram baseline: known losses, unseen pairs and counting in blocks."""

import math

import numpy as np
import pytest

from inner.measure import bigram
from inner.measure.bigram import bigram_loss


def test_a_known_chain_costs_its_entropy() -> None:
    rng = np.random.default_rng(0)
    # 0 is followed by 1, and 1 by 0 or 1 with equal probability, so two thirds of the steps cost
    # log 2.
    coins = rng.integers(0, 2, size=200_000)
    tokens = np.zeros(200_000, dtype=np.uint16)
    for i in range(1, len(tokens)):
        tokens[i] = 1 if tokens[i - 1] == 0 else coins[i]
    loss = bigram_loss(tokens[:100_000], tokens[100_000:], 2)
    assert loss == pytest.approx(math.log(2) * 2 / 3, abs=0.01)


def test_unseen_pairs_cost_a_finite_loss() -> None:
    loss = bigram_loss(
        np.array([0, 1, 0, 1], dtype=np.uint16), np.array([2, 3, 2], dtype=np.uint16), 4
    )
    assert loss == pytest.approx(math.log(4))


def test_pairs_across_counting_blocks_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(1).integers(0, 7, size=100).astype(np.uint16)
    whole = bigram_loss(tokens, tokens, 7)
    monkeypatch.setattr(bigram, "TOKENS_PER_COUNT", 9)
    assert bigram_loss(tokens, tokens, 7) == pytest.approx(whole, abs=1e-12)
