"""Radial-directional averaging (Decoupled DiLoCo, 2604.21428): lengths and directions are averaged
separately.
"""

from collections.abc import Iterable, Sequence
from statistics import median

import torch

from outer.merges.base import drop_weightless
from outer.merges.geometry import norm
from outer.merges.mean import weighted_mean

LEAST_AGREEMENT = 1e-3
"""If the mean of the directions is shorter than this, they cancel each other, and the direction
of the remainder is arbitrary."""
LEAST_NORM = 1e-30
"""Parts shorter than this share of the median length have no direction in fp32."""


def radial(
    parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
) -> torch.Tensor:
    """Return (sum_i w_i |x_i|) phi(sum_i w_i phi(x_i)), phi(x) = x / |x|, phi(0) = 0. The weights
    sum to 1.

    The mean of M orthogonal parts is sqrt(M) times shorter than they are; this result is not, so
    the number of islands can grow without retuning the outer learning rate. The paper applies this
    to each tensor and takes the mean of embeddings; here it applies to each part of the canonical
    space. If the directions cancel, the result is the weighted mean. A participant's length does
    not change the direction, but it lengthens the result. Ignores `last`.
    """
    weighted, shares = drop_weightless(parts, weights)
    norms = [norm(values) for values in weighted]
    # Lengths are in units of a typical length, so that coefficients stay within the range of fp32.
    unit = median([length for length in norms if length > 0] or [0.0])
    coefficients = [
        share * unit / length if length > LEAST_NORM * unit else 0.0
        for share, length in zip(shares, norms, strict=True)
    ]
    direction = weighted_mean(weighted, coefficients)
    agreement = norm(direction)
    if agreement <= LEAST_AGREEMENT * unit:
        return weighted_mean(weighted, shares)
    mean_norm = sum(share * length for share, length in zip(shares, norms, strict=True))
    return direction.mul_(mean_norm / agreement)
