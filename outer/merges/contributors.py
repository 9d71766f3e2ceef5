"""The mean over those who sent something: for sparse codecs, whose zeros say nothing (SparseLoCo's own code)."""

from collections.abc import Iterable, Sequence

import torch

from outer.merges.base import weighing
from outer.merges.mean import WeightedSum


def contributors(parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None) -> torch.Tensor:
    """Of each element sum_i w_i x_i / sum_i w_i over the x_i that are not zero; zero where all are.

    SparseLoCo's paper (2508.15706) divides by all weights, as the rule `mean` does: where one of eight islands sent an
    element, that result is eight times smaller. `last` does not matter.
    """
    heard, shares = weighing(parts, weights)
    total, weight = WeightedSum(heard[0].numel()), WeightedSum(heard[0].numel())
    for values, share in zip(heard, shares, strict=True):
        total.add(values, share)
        weight.add((values != 0).to(torch.float32), share)
    return total.result().div_(weight.result().clamp_(min=torch.finfo(torch.float32).tiny))
