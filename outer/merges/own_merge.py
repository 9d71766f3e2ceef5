"""A merge rule of the user's own, and the tests that it must pass before a run begins with it."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from outer.config.own_code import Options
from outer.errors import InputError
from outer.merges.base import Merge, drop_weightless
from outer.own_code import find, once, require

KEY = "outer.merge.rule"
Rule = Callable[..., torch.Tensor]
"""rule(parts, weights, last, **options) takes a list of 1-D fp32 tensors and their weights, all
above zero, and returns one such tensor. `last` is None."""


@once
def build_own_merge(path: str, options: Options) -> Merge:
    """Build the rule that an import path names and test it. Raises InputError."""
    return check_merge(partial(find(path, KEY), **options), path)


def check_merge(rule: Rule, name: str = "the rule") -> Merge:
    """Test what every merge rule must do, and return the rule with checks around it.

    Raises InputError with the requirement that does not hold.
    """

    def merge(
        parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None
    ) -> torch.Tensor:
        kept, shares = drop_weightless(parts, weights)
        merged = rule(kept, shares, last)
        if (
            merged.dtype != torch.float32
            or merged.shape != kept[0].shape
            or not merged.isfinite().all()
        ):
            raise InputError(
                f"{KEY}: {name} gave {merged.dtype} of shape {tuple(merged.shape)}; finite fp32 "
                f"values of shape {tuple(kept[0].shape)} expected"
            )
        return merged

    require(CLAIMS, merge, f"{KEY}: {name}")
    return merge


def _parts(islands: int, size: int = 300) -> list[torch.Tensor]:
    number = torch.arange(size, dtype=torch.float32)
    return [torch.sin(number * (island + 1)) * (island + 1) for island in range(islands)]


def gives_equal_bits(merge: Merge) -> bool:
    """Equal calls give equal bits, for one island and for several."""
    for islands in (1, 2, 3, 5):
        weights = [1 / islands] * islands
        if not torch.equal(
            merge(_parts(islands), weights, None), merge(_parts(islands), weights, None)
        ):
            return False
    return True


def ignores_islands_without_weight(merge: Merge) -> bool:
    """An island of weight zero changes nothing."""
    alone = merge(_parts(2), [0.5, 0.5], None)
    joined = merge([*_parts(2), torch.full((300,), 1e30)], [0.5, 0.5, 0.0], None)
    return torch.equal(alone, joined)


def takes_any_size(merge: Merge) -> bool:
    """A part of any size, from one element on, is merged to as many."""
    return all(
        merge(_parts(3, size), [0.5, 0.25, 0.25], None).shape == (size,)
        for size in (1, 2, 255, 256)
    )


CLAIMS = (gives_equal_bits, ignores_islands_without_weight, takes_any_size)
