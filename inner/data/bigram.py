"""A byte bigram model: the loss that a trained network must beat."""

import numpy as np

from inner.data.shards import Tokens

MAX_VOCAB_SIZE = 1024
TOKENS_PER_COUNT = 1 << 22
"""Pairs counted at once: bounds the temporary int64 arrays to some 100 MB."""

SMOOTHINGS = (1.0, 0.1, 0.01, 0.001)


def bigram_loss(train: Tokens, heldout: Tokens, vocab_size: int) -> float:
    """Held-out loss in nats per token of the bigram model counted on `train`, vocab_size at most 1024.

    Each pair is counted `smoothing` times more than seen; of a few smoothings the one best on the
    held-out text itself is taken, so the yardstick errs on the strong side.
    """
    assert vocab_size <= MAX_VOCAB_SIZE, f"a bigram table of {vocab_size} x {vocab_size} is too large"
    seen = _pair_counts(train, vocab_size)
    asked = _pair_counts(heldout, vocab_size)
    return min(_loss(seen + smoothing, asked) for smoothing in SMOOTHINGS)


def _loss(weights: np.ndarray, asked: np.ndarray) -> float:
    log_probs = np.log(weights) - np.log(weights.sum(axis=1, keepdims=True))
    return float(-(asked * log_probs).sum() / asked.sum())


def _pair_counts(tokens: Tokens, vocab_size: int) -> np.ndarray:
    """How often each (previous, next) pair occurs, float64 [vocab_size, vocab_size]."""
    counts = np.zeros(vocab_size * vocab_size, dtype=np.float64)
    for start in range(0, len(tokens) - 1, TOKENS_PER_COUNT):
        block = tokens[start : start + TOKENS_PER_COUNT + 1].astype(np.int64)
        counts += np.bincount(block[:-1] * vocab_size + block[1:], minlength=vocab_size * vocab_size)
    return counts.reshape(vocab_size, vocab_size)
