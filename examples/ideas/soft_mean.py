"""A merge rule: the mean of the islands' pseudo-gradients, each element of them bounded by `bound`
times its median.
"""

from collections.abc import Sequence

import torch


def soft_mean(
    parts: list[torch.Tensor],
    weights: Sequence[float],
    last: torch.Tensor | None,
    bound: float = 3.0,
) -> torch.Tensor:
    """`parts` are 1-D fp32 tensors of equal size, `weights` shares above zero; `last` is the last
    committed mean.
    """
    limit = bound * torch.stack(parts).abs().median(0).values
    merged = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        merged += weight / sum(weights) * part.clamp(-limit, limit)
    return merged
