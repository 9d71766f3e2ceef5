"""The geometric median by smoothed Weiszfeld iterations (RFA, 1912.13445)."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from outer.merges.base import drop_weightless
from outer.merges.geometry import distances, gram
from outer.merges.mean import weighted_mean

MAX_ITERATIONS = 100
TOLERANCE = 1e-6
"""Iterations end when no coefficient changes by more than this."""
SMOOTHING = 1e-6
"""Lower bound of distances, relative to the smallest distance between two parts. It avoids a
division by zero, because the median may be a participant's own part."""


def geometric_median(
    parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
) -> torch.Tensor:
    """Return the point z that minimises sum_i w_i |x_i - z|, over the part as one vector. Ignores
    `last`.

    A participant's pull does not grow with its distance, so participants with less than half of the
    tokens cannot move z far away. A participant with more than half decides alone: z is its own
    part. With fewer than three participants the result is the weighted mean.
    """
    weighted, shares = drop_weightless(parts, weights)
    if len(weighted) < 3:
        return weighted_mean(weighted, shares)
    return weighted_mean(weighted, _coefficients(gram(weighted), np.array(shares)).tolist())


def _coefficients(products: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the coefficients c of z = sum_i c_i x_i, which are non-negative and sum to 1."""
    squares = products.diagonal()
    between = np.sqrt((squares[:, None] + squares[None, :] - 2 * products).clip(min=0))
    # A point with half of the weight is the exact median. Weiszfeld would divide by zero at this
    # point.
    coincident = (between == 0) * shares
    if coincident.sum(axis=1).max() >= 0.5 * shares.sum():
        return _normalise(coincident[coincident.sum(axis=1).argmax()])
    least = SMOOTHING * between[between > 0].min()
    # The iterations do not start at the mean, which may be far away and would need many iterations.
    coefficients = _normalise(shares / np.median(between, axis=1).clip(min=least))
    for _ in range(MAX_ITERATIONS):
        # Weiszfeld: z <- sum_i b_i x_i / sum_i b_i, b_i = w_i / max(nu, |x_i - z|)
        before = coefficients
        coefficients = _normalise(shares / distances(products, before).clip(min=least))
        if np.abs(coefficients - before).max() <= TOLERANCE:
            break
    return coefficients


def _normalise(coefficients: np.ndarray) -> np.ndarray:
    return coefficients / coefficients.sum()
