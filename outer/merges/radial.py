"""Radial-directional averaging (Decoupled DiLoCo, 2604.21428): lengths and directions are averaged apart."""

from collections.abc import Iterable, Sequence
from statistics import median

import torch

from outer.merges.base import weighing
from outer.merges.geometry import norm
from outer.merges.mean import weighted_mean

LEAST_AGREEMENT = 1e-3
"""Directions whose mean is shorter than this cancel: what is left of them points anywhere."""
LEAST_NORM = 1e-30
"""A part shorter than this share of the median part has no direction that fp32 could tell."""


def radial(parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None) -> torch.Tensor:
    """(sum_i w_i |x_i|) phi(sum_i w_i phi(x_i)), phi(x) = x / |x|, phi(0) = 0; the weights sum to 1.

    The mean of M orthogonal parts is sqrt(M) times shorter than they are, and this is not: raise the number of
    islands without retuning the outer learning rate. The paper does this for each tensor and takes the mean of
    embeddings; here it is each part of the canonical space. Parts whose directions cancel: the weighted mean. A
    participant's length does not turn the direction, but it lengthens the result. `last` does not matter.
    """
    heard, shares = weighing(parts, weights)
    norms = [norm(values) for values in heard]
    # In units of a typical length, so that no coefficient leaves the range of fp32.
    unit = median([length for length in norms if length > 0] or [0.0])
    coefficients = [
        share * unit / length if length > LEAST_NORM * unit else 0.0
        for share, length in zip(shares, norms, strict=True)
    ]
    direction = weighted_mean(heard, coefficients)
    agreement = norm(direction)
    if agreement <= LEAST_AGREEMENT * unit:
        return weighted_mean(heard, shares)
    mean_norm = sum(share * length for share, length in zip(shares, norms, strict=True))
    return direction.mul_(mean_norm / agreement)
