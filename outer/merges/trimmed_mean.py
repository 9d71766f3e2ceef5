"""The coordinate-wise trimmed mean (1803.01498): the extremes of every coordinate do not count."""

import math
from collections.abc import Iterable, Sequence

import torch

from outer.merges.base import weighing
from outer.merges.mean import weighted_mean
from outer.merges.order import chunks, sorted_rows

ROUNDING = 1e-9
"""0.07 * 100 is a little more than 7 in fp64, and does not mean 8."""


def num_trimmed(trim: float, num_participants: int) -> int:
    """How many participants are left out at each end of a coordinate; some stay between."""
    #   trim    participants  left out at each end
    #   0.125   1, 2          0
    #   0.125   3 .. 8        1
    #   0.125   9 .. 16       2
    #   0.4     3             1    not 2: one must stay
    return min(math.ceil(trim * num_participants - ROUNDING), (num_participants - 1) // 2)


def trimmed_mean(
    parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None, *, trim: float
) -> torch.Tensor:
    """In every coordinate the mean of what lies between its b-th lowest and b-th highest value, without these.

    b = num_trimmed(trim, participants), counted by heads: tokens buy nobody a way out of the trimming. Those that
    stay weigh by their tokens. With at most b attackers the result lies between the honest participants' least and
    greatest value. Values equal to the outermost one that stays all stay, so the order of participants matters no
    more than to a sum. Fewer than three participants: the weighted mean. `last` does not matter.
    """
    heard, shares = weighing(parts, weights)
    cut = num_trimmed(trim, len(heard))
    if cut == 0:
        return weighted_mean(heard, shares)
    result = torch.empty_like(heard[0])
    for chunk in chunks(result.numel()):
        result[chunk] = _trimmed([values[chunk] for values in heard], shares, cut)
    return result


def _trimmed(rows: list[torch.Tensor], shares: list[float], cut: int) -> torch.Tensor:
    ordered = sorted_rows(rows)
    low, high = ordered[cut], ordered[-1 - cut]
    total, weight = torch.zeros_like(low), torch.zeros_like(low)
    for values, share in zip(rows, shares, strict=True):
        weights = ((values >= low) & (values <= high)) * share
        total.add_(values * weights)
        weight.add_(weights)
    # Rounding must not carry the quotient out of the range of what was averaged.
    return total.div_(weight).clamp_(low, high)
