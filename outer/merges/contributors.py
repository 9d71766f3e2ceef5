"""The mean of each element over the participants that sent it, for sparse codecs (as in
SparseLoCo's own code).
"""

from collections.abc import Iterable, Sequence

import torch

from outer.merges.base import drop_weightless
from outer.merges.mean import WeightedSum


def contributors(
    parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
) -> torch.Tensor:
    """Return elementwise sum_i w_i x_i / sum_i w_i over the nonzero x_i; zero where all are zero.
    Ignores `last`.

    SparseLoCo's paper (2508.15706) divides by all weights, like the rule `mean`. With it, an
    element that one of eight islands has sent would be eight times smaller.
    """
    weighted, shares = drop_weightless(parts, weights)
    total = WeightedSum(weighted[0].numel())
    weight = WeightedSum(weighted[0].numel())
    for values, share in zip(weighted, shares, strict=True):
        total.add(values, share)
        weight.add((values != 0).to(torch.float32), share)
    return total.result().div_(weight.result().clamp_(min=torch.finfo(torch.float32).tiny))
