"""Byte bigram model: a baseline loss that a trained network must beat."""

import numpy as np

from inner.data.shards import Tokens

MAX_VOCAB_SIZE = 1024
TOKENS_PER_COUNT = 1 << 22
"""Number of pairs counted at a time, which limits the temporary int64 arrays to about 100 MB."""
SMOOTHINGS = (1.0, 0.1, 0.01, 0.001)


def bigram_loss(train: Tokens, heldout: Tokens, vocab_size: int) -> float:
    """Return the held-out loss, in nats per token, of the bigram model counted on `train`;
    vocab_size is at most 1024.

    A smoothing constant is added to the count of every pair. The best of a few constants is chosen
    on the held-out text itself, so the baseline is rather too good than too bad.
    """
    assert vocab_size <= MAX_VOCAB_SIZE, (
        f"a bigram table of {vocab_size} x {vocab_size} is too large"
    )
    seen = _pair_counts(train, vocab_size)
    heldout_counts = _pair_counts(heldout, vocab_size)
    return min(_loss(seen + smoothing, heldout_counts) for smoothing in SMOOTHINGS)


def _loss(weights: np.ndarray, counts: np.ndarray) -> float:
    log_probs = np.log(weights) - np.log(weights.sum(axis=1, keepdims=True))
    return float(-(counts * log_probs).sum() / counts.sum())


def _pair_counts(tokens: Tokens, vocab_size: int) -> np.ndarray:
    """Count the occurrences of each (previous, next) pair, float64 [vocab_size, vocab_size]."""
    counts = np.zeros(vocab_size * vocab_size, dtype=np.float64)
    for start in range(0, len(tokens) - 1, TOKENS_PER_COUNT):
        block = tokens[start : start + TOKENS_PER_COUNT + 1].astype(np.int64)
        counts += np.bincount(
            block[:-1] * vocab_size + block[1:], minlength=vocab_size * vocab_size
        )
    return counts.reshape(vocab_size, vocab_size)
