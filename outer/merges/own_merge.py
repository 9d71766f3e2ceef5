"""A merge rule of the user's own, and what is tried before a run begins with it."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch

from outer.config.own_code import Options
from outer.errors import InputError
from outer.merges.base import Merge, drop_weightless
from outer.own_code import load

KEY = "outer.merge.rule"
Rule = Callable[..., torch.Tensor]
"""rule(parts, weights, last, **options): a list of 1-D fp32 tensors, and their weights, all above zero, to one such
tensor. `last` is None."""


def build_own_merge(path: str, options: Options) -> Merge:
    """Build the rule that an import path names and try it. Raises InputError."""
    return _build(path, tuple(sorted(options.items())))


@cache
def _build(path: str, options: tuple[tuple[str, Any], ...]) -> Merge:
    return check_merge(partial(load(path, KEY), **dict(options)), path)


def check_merge(rule: Rule, name: str = "the rule") -> Merge:
    """Try what every merge rule must do, and return it with checks around it.

    Raises InputError with the claim that does not hold.
    """

    def merge(parts: Iterable[torch.Tensor], weights: Sequence[float], last: torch.Tensor | None) -> torch.Tensor:
        kept, shares = drop_weightless(parts, weights)
        merged = rule(kept, shares, last)
        if merged.dtype != torch.float32 or merged.shape != kept[0].shape or not merged.isfinite().all():
            raise InputError(
                f"{KEY}: {name} gave {merged.dtype} of shape {tuple(merged.shape)}; finite fp32 values of shape "
                f"{tuple(kept[0].shape)} expected"
            )
        return merged

    for claim in CLAIMS:
        try:
            holds = claim(merge)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{KEY}: {name}: {claim.__doc__} failed: {type(error).__name__}: {error}") from error
        if not holds:
            raise InputError(f"{KEY}: {name} must do this: {claim.__doc__}")
    return merge


def _parts(islands: int, size: int = 300) -> list[torch.Tensor]:
    number = torch.arange(size, dtype=torch.float32)
    return [torch.sin(number * (island + 1)) * (island + 1) for island in range(islands)]


def gives_equal_bits(merge: Merge) -> bool:
    """Equal calls give equal bits, for one island and for several."""
    for islands in (1, 2, 3, 5):
        weights = [1 / islands] * islands
        if not torch.equal(merge(_parts(islands), weights, None), merge(_parts(islands), weights, None)):
            return False
    return True


def ignores_islands_without_weight(merge: Merge) -> bool:
    """An island of weight zero changes nothing."""
    alone = merge(_parts(2), [0.5, 0.5], None)
    joined = merge([*_parts(2), torch.full((300,), 1e30)], [0.5, 0.5, 0.0], None)
    return torch.equal(alone, joined)


def takes_any_size(merge: Merge) -> bool:
    """A part of any size, from one element on, is merged to as many."""
    return all(merge(_parts(3, size), [0.5, 0.25, 0.25], None).shape == (size,) for size in (1, 2, 255, 256))


CLAIMS = (gives_equal_bits, ignores_islands_without_weight, takes_any_size)
