"""What every merge rule is: a function from the participants' parts to one."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from outer.errors import MessageError


class Merge(Protocol):
    """One part (1-D fp32, CPU) of at least one participant's, in participant order; equal calls give equal bits.

    `weights` are shares of the tokens, not negative; who weighs nothing has no say in any rule. `last` is the last
    committed mean of the same part, None when this rank has not seen it. All values must be finite.
    """

    def __call__(
        self, parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
    ) -> torch.Tensor: ...


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


def weighing(parts: Iterable[torch.Tensor], weights: Sequence[float]) -> tuple[list[torch.Tensor], list[float]]:
    """The parts that weigh something, and their weights; there is at least one."""
    kept = [(values, weight) for values, weight in zip(parts, weights, strict=True) if weight > 0]
    assert kept, "somebody must weigh something"
    return [values for values, _ in kept], [weight for _, weight in kept]
