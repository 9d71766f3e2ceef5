"""The mean of the participants' parts, weighted by the tokens behind each."""

from collections.abc import Sequence

import torch

from outer.errors import MessageError


def weights_of(tokens: Sequence[int]) -> list[float]:
    """Each participant's share of all tokens, at least one participant; they sum to 1 (within rounding).

    When nobody trained on any token, all weigh the same. Raises MessageError on a negative count.
    """
    #   tokens         weights
    #   [300, 100]     [0.75, 0.25]
    #   [300, 0]       [1.0, 0.0]      a joiner's first round
    #   [0, 0]         [0.5, 0.5]
    assert tokens, "a round has at least one participant"
    if any(count < 0 for count in tokens):
        raise MessageError(f"token counts {list(tokens)}: none may be negative")
    total = sum(tokens)
    if total == 0:
        return [1 / len(tokens)] * len(tokens)
    return [count / total for count in tokens]


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


def weighted_mean(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Sum of weight * part over at least one part, 1-D fp32, in the order given."""
    total = WeightedSum(parts[0].numel())
    for values, weight in zip(parts, weights, strict=True):
        total.add(values, weight)
    return total.result()
