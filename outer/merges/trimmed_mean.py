"""The coordinate-wise trimmed mean (1803.01498), which leaves out the extreme values of every
coordinate.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from outer.merges.base import drop_weightless
from outer.merges.mean import weighted_mean
from outer.merges.sort_rows import chunks, sort_rows

ROUNDING = 1e-9
"""Tolerance of the product: 0.07 * 100 is slightly more than 7 in fp64, but must not round up to
8."""


def num_trimmed(trim: float, num_participants: int) -> int:
    """Return the number of values left out at each end of a coordinate; at least one value
    stays.
    """
    #   trim    participants  left out at each end
    #   0.125   1, 2          0
    #   0.125   3 .. 8        1
    #   0.125   9 .. 16       2
    #   0.4     3             1    not 2: one must stay
    return min(math.ceil(trim * num_participants - ROUNDING), (num_participants - 1) // 2)


def trimmed_mean(
    parts: Iterable[torch.Tensor],
    weights: Sequence[float],
    last: torch.Tensor | None,
    *,
    trim: float,
) -> torch.Tensor:
    """Return for every coordinate the weighted mean of its values without the b lowest and b
    highest. Ignores `last`.

    b = num_trimmed(trim, participants). Trimming counts participants, whatever their tokens; the
    values that stay are weighted by tokens. With at most b attackers the result is between the
    smallest and the largest value of the honest participants. All values equal to the outermost one
    that stays are kept, so the order of participants matters no more than it does for a sum. With
    fewer than three participants the result is the weighted mean.
    """
    weighted, shares = drop_weightless(parts, weights)
    cut = num_trimmed(trim, len(weighted))
    if cut == 0:
        return weighted_mean(weighted, shares)
    result = torch.empty_like(weighted[0])
    for chunk in chunks(result.numel()):
        result[chunk] = _average_inner([values[chunk] for values in weighted], shares, cut)
    return result


def _average_inner(rows: list[torch.Tensor], shares: list[float], cut: int) -> torch.Tensor:
    ordered = sort_rows(rows)
    low = ordered[cut]
    high = ordered[-1 - cut]
    total = torch.zeros_like(low)
    weight = torch.zeros_like(low)
    for values, share in zip(rows, shares, strict=True):
        weights = ((values >= low) & (values <= high)) * share
        total.add_(values * weights)
        weight.add_(weights)
    # Clamped, because rounding could move the quotient out of the range of the averaged values.
    return total.div_(weight).clamp_(low, high)
