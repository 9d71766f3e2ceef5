"""The mean of one part. Equal payloads give equal bytes, on the part's reducer and on any rank
that recomputes the mean.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import torch

from outer.agreement.messages import Plan, Ready
from outer.config import BETWEEN_RULES
from outer.errors import NonFiniteError
from outer.merges.base import Merge, weights_of
from outer.merges.geometry import fast_norm
from outer.merges.mean import hold_between
from outer.merges.mean import mean as weighted
from outer.reduce.filters import AttemptFilters
from outer.reduce.payloads import Payloads
from outer.space.layout import Part


def encode_mean_of(
    part: int,
    encoded: Sequence[torch.Tensor],
    plan: Plan,
    payloads: Payloads,
    merge: Merge,
    filters: AttemptFilters,
    last: torch.Tensor | None,
) -> tuple[torch.Tensor, list[str]]:
    """Return the encoded mean, and the islands that the filters left out of it.

    Experts that no contributor has sent a token to have the mean 0 (`outer.merge.experts: routed`).
    Buffers are merged by the rule only if its result lies between the islands' values; otherwise by
    the mean. `encoded` are the payloads of the plan's contributors, in its order. `last` is the
    last committed mean of the part, if a rule needs it. Raises PoisonError.
    """
    names = [p.island for p in plan.contributors]
    tokens = tokens_of(payloads.bounds(part), plan.contributors)
    # Values are decoded one part at a time. A merge rule that needs all parts at once collects them
    # itself.
    values = (
        payloads.decode(part, payload, name) for payload, name in zip(encoded, names, strict=True)
    )
    filtered: list[str] = []
    lengths: dict[str, float] = {}
    if filters.config.refuses_payloads and filters.bound is not None:
        values = _measure(values, names, lengths)
    if filters.config.has_filters:
        parts = list(values)
        is_outlier = filters.find_outliers(part, names, parts, weights_of(tokens), last)
        filtered = list(compress(names, is_outlier))
        is_kept = [not is_out for is_out in is_outlier]
        values = compress(parts, is_kept)
        tokens = list(compress(tokens, is_kept))
    weights = weights_of(tokens)
    if payloads.bounds(part).count is not None and not any(tokens):
        mean = weighted(values, [0.0] * len(weights), None)
    elif payloads.is_buffer(part):
        mean = _merge_buffers(
            list(values), weights, merge if filters.config.rule in BETWEEN_RULES else weighted
        )
    else:
        mean = merge(values, weights, last)
    if filters.bound is not None:
        payloads.refuse_too_long(
            part, {k: v for k, v in lengths.items() if k not in filtered}, filters.bound
        )
    try:
        return payloads.encode_mean(part, mean), filtered
    except NonFiniteError as error:
        raise payloads.find_overflow(part, encoded, names, error) from None


def tokens_of(part: Part, contributors: Sequence[Ready]) -> list[int]:
    """Return the number of tokens by which each contributor weighs in the mean of the part."""
    if part.count is not None:
        return [each.expert_counts[part.count] for each in contributors]
    return [each.expert_tokens if part.is_experts else each.weight for each in contributors]


def _merge_buffers(
    parts: Sequence[torch.Tensor], weights: Sequence[float], merge: Merge
) -> torch.Tensor:
    return hold_between(merge(parts, weights, None), parts, weights)


def _measure(
    values: Iterable[torch.Tensor], names: Sequence[str], lengths: dict[str, float]
) -> Iterator[torch.Tensor]:
    """Yield the values unchanged, and store their norms in `lengths`."""
    for each, name in zip(values, names, strict=True):
        lengths[name] = fast_norm(each)
        yield each
