"""HeLoCo's rule (2606.00271): a stale pseudo-gradient that points against the outer momentum is
turned towards it.

For each part, with pseudo-gradient D, momentum m, their cosine c, and u = D / |D|, v = m / |m|:

    c >= keep        D' = D
    0 <= c < keep    D' = |D| w / |w|,  w = (1 - t) u + t v,  t = min(turn (1 - c) trust, 1)
    c < 0            D' = D - s c |D| v,  s = min(shrink (-c) trust, most)
    trust = |D| / (|D| + doubt |m|)

The paper uses tensors instead of parts, and for m a running mean, which is (1 - momentum) times the
buffer of SGD.
"""

import math
from typing import NamedTuple

import torch

from outer.config import AlignConfig, OuterOptimizerConfig
from outer.merges.geometry import inner_product, norm

GRID_BITS = 12
"""Number of bits that are kept of all numbers from sums over a part. The last bits of such sums
differ between machines."""
GREATEST_RATIO = 1e30
"""If one vector is longer than the other by more than this factor, the shorter one has no usable
direction in fp32."""


class Blend(NamedTuple):
    """The result D' = of_mean D + of_momentum m."""

    of_mean: float = 1.0
    of_momentum: float = 0.0

    def apply(self, mean: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        """Return D' of a part or of a stretch of it, fp32; `mean` itself where nothing changes."""
        if self == UNCHANGED:
            return mean
        # Each product is rounded separately. If it were fused with the sum, the bits would depend
        # on the machine.
        return (mean * self.of_mean).add_(momentum * self.of_momentum)


UNCHANGED = Blend()


def find_blend(mean: torch.Tensor, momentum: torch.Tensor, config: OuterOptimizerConfig) -> Blend:
    """Return how the rule changes a part's mean pseudo-gradient (1-D fp32) before the step.

    The result is the same on every machine. The mean stays unchanged without `align` in the config,
    and if one vector is negligible beside the other.
    """
    if config.align is None:
        return UNCHANGED
    length = norm(mean)
    other = norm(momentum)
    if length == 0 or other == 0 or not 1 / GREATEST_RATIO < length / other < GREATEST_RATIO:
        return UNCHANGED
    cosine = _coarse(inner_product(mean, momentum) / (length * other))
    ratio = _coarse(length / other)
    trust = ratio / (ratio + config.align.doubt * (1.0 - config.momentum))
    return _blend(cosine, ratio, trust, config.align)


def _blend(cosine: float, ratio: float, trust: float, align: AlignConfig) -> Blend:
    """Apply the rule's case for a cosine. `ratio` is |D| / |m|."""
    if cosine >= align.keep:
        return UNCHANGED
    if cosine < 0:
        share = min(align.shrink * -cosine * trust, align.most)
        return Blend(of_momentum=-share * cosine * ratio)
    turned = min(align.turn * (1.0 - cosine) * trust, 1.0)
    length = math.sqrt((1.0 - turned) ** 2 + turned**2 + 2.0 * turned * (1.0 - turned) * cosine)
    return Blend((1.0 - turned) / length, turned * ratio / length)


def _coarse(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, GRID_BITS)), exponent - GRID_BITS)
