"""The geometric median by smoothed Weiszfeld iterations (RFA, 1912.13445)."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from outer.merges.base import weighing
from outer.merges.geometry import distances, gram
from outer.merges.mean import weighted_mean

MAX_ITERATIONS = 100
TOLERANCE = 1e-6
"""Iterations end when no coefficient changes by more."""
SMOOTHING = 1e-6
"""Distances count as at least this share of the least there is: the median may be a participant's own part."""


def geometric_median(
    parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
) -> torch.Tensor:
    """The point z that minimises sum_i w_i |x_i - z|, over the part as one vector.

    A participant's pull does not grow with its distance, so those with less than half of the tokens cannot carry z
    away. One with more than half decides alone: z is then its own part. Fewer than three participants: the weighted
    mean. `last` does not matter.
    """
    heard, shares = weighing(parts, weights)
    if len(heard) < 3:
        return weighted_mean(heard, shares)
    return weighted_mean(heard, _coefficients(gram(heard), np.array(shares)).tolist())


def _coefficients(products: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The c of z = sum_i c_i x_i, positive, summing to 1."""
    squares = products.diagonal()
    between = np.sqrt((squares[:, None] + squares[None, :] - 2 * products).clip(min=0))
    # Half of the weight at one point makes it the median, exactly; there Weiszfeld would divide by zero.
    here = (between == 0) * shares
    if here.sum(axis=1).max() >= 0.5 * shares.sum():
        return _normalised(here[here.sum(axis=1).argmax()])
    least = SMOOTHING * between[between > 0].min()
    # The start must not be the mean: from far away Weiszfeld needs many iterations to come back.
    apart = np.median(between, axis=1)
    found = _normalised(shares / apart.clip(min=least))
    for _ in range(MAX_ITERATIONS):
        # Weiszfeld: z <- sum_i b_i x_i / sum_i b_i, b_i = w_i / max(nu, |x_i - z|)
        before, found = found, _normalised(shares / distances(products, found).clip(min=least))
        if np.abs(found - before).max() <= TOLERANCE:
            break
    return found


def _normalised(coefficients: np.ndarray) -> np.ndarray:
    return coefficients / coefficients.sum()
