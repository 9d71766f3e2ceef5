"""The merge interface: a function that combines the participants' parts into one."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from outer.errors import MessageError


class Merge(Protocol):
    """Merges the parts (1-D fp32, CPU) of at least one participant, given in participant order.

    Equal calls give equal bits. `weights` are non-negative shares of the tokens; every rule ignores
    participants of weight zero. `last` is the last committed mean of the same part, or None if this
    rank has not seen it. All values must be finite.

    >>> from outer.config import MergeConfig
    >>> from outer.merges import build_merge
    >>> parts = [torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]), torch.tensor([900.0, 2.0])]
    >>> merge = build_merge(MergeConfig(rule="trimmed_mean"))
    >>> merge(parts, weights_of([100, 100, 200]), None)
    tensor([2., 1.])
    """

    def __call__(
        self, parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
    ) -> torch.Tensor: ...


def weights_of(tokens: Sequence[int]) -> list[float]:
    """Return each participant's share of all tokens. The shares sum to 1, within rounding.

    If no participant has trained on any token, all shares are equal. There must be at least one
    participant. Raises MessageError on a negative count.
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


def drop_weightless(
    parts: Iterable[torch.Tensor], weights: Sequence[float]
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the parts of nonzero weight, at least one, and their weights."""
    kept = [(values, weight) for values, weight in zip(parts, weights, strict=True) if weight > 0]
    assert kept, "at least one weight must be positive"
    return [values for values, _ in kept], [weight for _, weight in kept]
