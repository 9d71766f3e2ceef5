"""The mean of one part: the same bytes from the same payloads, on its reducer and on whoever recomputes it."""

from collections.abc import Sequence
from itertools import compress

import torch

from outer.agreement.messages import Plan
from outer.errors import NonFiniteError
from outer.merges.base import Merge, weights_of
from outer.reduce.filters import AttemptFilters
from outer.reduce.payloads import Payloads


def encode_mean_of(
    part: int,
    encoded: Sequence[torch.Tensor],
    plan: Plan,
    payloads: Payloads,
    merge: Merge,
    filters: AttemptFilters,
    last: torch.Tensor | None,
) -> tuple[torch.Tensor, list[str]]:
    """The encoded mean, and the islands that the filters left out of it.

    `encoded` are the payloads of the plan's contributors, in its order. `last` is the last committed mean of the part,
    if a rule needs it. Raises PoisonError.
    """
    names, tokens = [p.island for p in plan.contributors], [p.weight for p in plan.contributors]
    # Decoded one at a time; a merge rule that needs all parts at once collects them itself.
    values = (payloads.decode(part, payload, name) for payload, name in zip(encoded, names, strict=True))
    filtered: list[str] = []
    if filters.config.has_filters:
        parts = list(values)
        is_outlier = filters.find_outliers(part, names, parts, weights_of(tokens), last)
        filtered = list(compress(names, is_outlier))
        is_kept = [not is_out for is_out in is_outlier]
        values, tokens = compress(parts, is_kept), list(compress(tokens, is_kept))
    mean = merge(values, weights_of(tokens), last)
    try:
        return payloads.encode_mean(part, mean), filtered
    except NonFiniteError as error:
        raise payloads.find_overflow(part, encoded, names, error) from None
