"""The weighted mean: sum of weight * part. One participant's bad part can move it anywhere."""

from collections.abc import Iterable, Sequence

import torch


class WeightedSum:
    """Adds up weighted parts in fp32, in the order of the calls.

    Product and sum round separately, each to nearest: equal calls give equal bits on every machine.
    """

    def __init__(self, num_elements: int) -> None:
        self._sum = torch.zeros(num_elements)

    def add(self, values: torch.Tensor, weight: float) -> None:
        """Add weight * values (1-D fp32, CPU; the weight is rounded to fp32 first)."""
        shape = self._sum.shape
        assert values.shape == shape, f"a part of shape {tuple(values.shape)} into a sum of {tuple(shape)}"
        # Not add_(values, alpha=weight): that fuses on machines with FMA, and the bits would depend on them.
        self._sum.add_(values * weight)

    def result(self) -> torch.Tensor:
        """The sum so far, 1-D fp32; the tensor itself, so take it when the last part is in."""
        return self._sum


def weighted_mean(parts: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Sum of weight * part over at least one part, 1-D fp32, in the order given; one part is held at a time."""
    total: WeightedSum | None = None
    for values, weight in zip(parts, weights, strict=True):
        if total is None:
            total = WeightedSum(values.numel())
        total.add(values, weight)
    assert total is not None, "a mean of nothing"
    return total.result()


def mean(parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None) -> torch.Tensor:
    """The weighted mean; `last` does not matter."""
    return weighted_mean(parts, weights)
