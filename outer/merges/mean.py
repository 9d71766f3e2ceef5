"""The weighted mean: the sum of weight * part. A single bad part can move it anywhere."""

from collections.abc import Iterable, Sequence

import torch

from outer.space.buffers import BUFFERS

STRETCH_ELEMENTS = 1 << 15
"""Number of elements that are multiplied and added at once, so that the product stays in a
core's cache."""


class WeightedSum:
    """Sum of weighted parts in fp32, in the order of the calls.

    Product and sum are rounded separately, each to nearest, so that equal calls give equal bits on
    every machine.
    """

    def __init__(self, num_elements: int) -> None:
        self._sum = BUFFERS.floats(num_elements).zero_()
        self._product = torch.empty(min(num_elements, STRETCH_ELEMENTS))

    def add(self, values: torch.Tensor, weight: float) -> None:
        """Add weight * values (1-D fp32, CPU). The weight is rounded to fp32 first."""
        shape = self._sum.shape
        assert values.shape == shape, (
            f"a part of shape {tuple(values.shape)} into a sum of {tuple(shape)}"
        )
        # add_(values, alpha=weight) would fuse product and sum on machines with FMA, which gives
        # other bits.
        for part, total in zip(
            values.split(STRETCH_ELEMENTS), self._sum.split(STRETCH_ELEMENTS), strict=True
        ):
            total.add_(torch.mul(part, weight, out=self._product[: part.numel()]))

    def result(self) -> torch.Tensor:
        """Return the sum so far, 1-D fp32. This is the internal tensor, so call it after the
        last `add`.
        """
        return self._sum


def weighted_mean(parts: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the sum of weight * part over at least one part, 1-D fp32, in the given order.
    Holds one part at a time.
    """
    total: WeightedSum | None = None
    for values, weight in zip(parts, weights, strict=True):
        if total is None:
            total = WeightedSum(values.numel())
        total.add(values, weight)
    assert total is not None, "a mean of nothing"
    return total.result()


def hold_between(
    mean: torch.Tensor, parts: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """Return the mean with each element limited to the range of the participants' values.

    Rounding can leave that range a little. Values that are equal everywhere then stay as they are,
    round after round, and a mean of variances is never below 0.
    """
    weighted = torch.stack(
        [part for part, weight in zip(parts, weights, strict=True) if weight > 0]
    )
    return torch.minimum(torch.maximum(mean, weighted.amin(dim=0)), weighted.amax(dim=0))


def mean(
    parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
) -> torch.Tensor:
    """Return the weighted mean. Ignores `last`."""
    return weighted_mean(parts, weights)
