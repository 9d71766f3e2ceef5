"""Centered clipping (2012.10333): a mean that clips each participant's distance from a center."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from outer.merges.base import drop_weightless
from outer.merges.geometry import distances, gram
from outer.merges.mean import weighted_mean
from outer.merges.sort_rows import coordinate_median

ITERATIONS = 5


def centered_clip(
    parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
) -> torch.Tensor:
    """Iterate v <- v + sum_i w_i (x_i - v) min(1, tau / |x_i - v|) five times, over the part as one
    vector.

    v starts at `last`, or at the coordinate-wise median if `last` is None. tau is the unweighted
    median of |x_i - v| in each iteration: no participant moves v by more than its weight times the
    median distance.
    """
    weighted, shares = drop_weightless(parts, weights)
    start = coordinate_median(weighted) if last is None else last
    coefficients = _coefficients(gram([start, *weighted]), np.array(shares))
    return weighted_mean([start, *weighted], coefficients.tolist())


def _coefficients(products: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the coefficients c of v = c_0 start + sum_i c_i x_i, which sum to 1."""
    coefficients = np.zeros(len(products))
    coefficients[0] = 1.0
    for _ in range(ITERATIONS):
        lengths = distances(products, coefficients)[1:]
        radius = np.median(lengths)
        # Only lengths above the radius are divided by, because a participant's part may equal v.
        clipped = shares * np.divide(
            radius, lengths, out=np.ones_like(lengths), where=lengths > radius
        )
        coefficients *= 1.0 - clipped.sum()
        coefficients[1:] += clipped
    return coefficients
