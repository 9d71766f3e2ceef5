"""Centered clipping (2012.10333): a mean around the last one, in which nobody counts from too far away."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from outer.merges.base import weighing
from outer.merges.geometry import distances, gram
from outer.merges.mean import weighted_mean
from outer.merges.order import coordinate_median

ITERATIONS = 5


def centered_clip(parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None) -> torch.Tensor:
    """v after five times v <- v + sum_i w_i (x_i - v) min(1, tau / |x_i - v|), over the part as one vector.

    v starts at `last`, or at the coordinate-wise median where there is none. tau is the median of the |x_i - v| in
    each iteration, counted by heads: no participant moves v by more than its weight times the median distance.
    """
    heard, shares = weighing(parts, weights)
    start = coordinate_median(heard) if last is None else last
    coefficients = _coefficients(gram([start, *heard]), np.array(shares))
    return weighted_mean([start, *heard], coefficients.tolist())


def _coefficients(products: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The c of v = c_0 start + sum_i c_i x_i, summing to 1."""
    found = np.zeros(len(products))
    found[0] = 1.0
    for _ in range(ITERATIONS):
        away = distances(products, found)[1:]
        radius = np.median(away)
        # Divided only where it clips: a participant may sit at v itself.
        clipped = shares * np.divide(radius, away, out=np.ones_like(away), where=away > radius)
        found *= 1.0 - clipped.sum()
        found[1:] += clipped
    return found
