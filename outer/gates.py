"""Who is let into a part's mean: participants far too long, or turned away from the last mean, are left out."""

from collections.abc import Sequence
from statistics import median

import torch

from outer.config import MergeConfig
from outer.merges.geometry import inner_product, norm


def left_out(
    parts: Sequence[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None, config: MergeConfig
) -> list[bool]:
    """For each participant whether the gates leave its part out (parts are 1-D fp32, in participant order).

    Participants that weigh nothing are neither asked nor left out. When the gates would leave out all others, they
    leave out none: a round with a doubtful mean is what the run would have without gates. `last` is the last
    committed mean of the part; None passes the direction gate.
    """
    heard = [index for index, weight in enumerate(weights) if weight > 0]
    failed = _too_long(parts, heard, config.max_norm_ratio) | _turned_away(parts, heard, last, config.min_cosine)
    if len(failed) == len(heard):
        failed = set()
    return [index in failed for index in range(len(parts))]


def _too_long(parts: Sequence[torch.Tensor], heard: list[int], max_ratio: float | None) -> set[int]:
    """Whose norm is over the ratio x the median norm; nobody's when most are zero."""
    if max_ratio is None:
        return set()
    norms = {index: norm(parts[index]) for index in heard}
    # Of two the median is halfway between: a ratio of 2 or more leaves out neither, for nobody knows which is wrong.
    limit = max_ratio * median(norms.values())
    return {index for index, length in norms.items() if length > limit > 0}


def _turned_away(
    parts: Sequence[torch.Tensor], heard: list[int], last: torch.Tensor | None, min_cosine: float | None
) -> set[int]:
    """Whose cosine with the last mean is below the bound; a part of zeros has no direction, and passes."""
    if min_cosine is None or last is None:
        return set()
    # Not divided: either norm may be zero, and then both sides are.
    bound = min_cosine * norm(last)
    return {index for index in heard if inner_product(parts[index], last) < bound * norm(parts[index])}
