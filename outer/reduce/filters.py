"""Filters that leave outliers out of a part's mean: parts whose norm is too large, or whose
direction differs from the last mean's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from outer.config import MergeConfig
from outer.merges.bound import Bound
from outer.merges.geometry import inner_product, norm
from outer.reduce.norm_zscore import History, is_anomalous, update_history

Histories = Mapping[str, History]
"""Norm histories of one part, by participant."""


class OutlierFilters:
    """The filters of one rank, with the norm histories of the parts that it reduces (for
    `max_norm_zscore`).

    A part's histories are kept only while this rank reduces the part in every round that sends it,
    and only for the participants of the last plan. Norms that were left out, or whose attempt did
    not commit, do not enter them.
    """

    def __init__(self, config: MergeConfig) -> None:
        self._config = config
        self.histories: dict[int, Histories] = {}
        """Norm histories by part, as of the last commit."""
        self._pending: dict[int, Histories] = {}
        self._next_round = 0
        self.bound: Bound | None = None
        """The bound above which reducers refuse payloads in the next attempts; None if it was
        not set, as where a mean is recomputed."""

    def begin(self, round_number: int, participants: Collection[str]) -> "AttemptFilters":
        """Return the filters of a new attempt. Drops the data of an earlier attempt."""
        if round_number != self._next_round:
            # After missed rounds the histories are outdated, because other islands have reduced
            # these parts since then.
            self.histories.clear()
        attempt = AttemptFilters(
            self._config, dict(self.histories), frozenset(participants), bound=self.bound
        )
        self._pending = attempt.noted
        return attempt

    def commit(self, round_number: int, parts: Collection[int]) -> None:
        """Adopt the histories of the last attempt. `parts`: the parts of the round that this
        rank carries.
        """
        for part in parts:
            self.histories.pop(part, None)
        self.histories |= self._pending
        self._pending = {}
        self._next_round = round_number + 1

    def clear(self) -> None:
        """Forget all histories, because the island has taken another history of rounds."""
        self.histories.clear()

    def load(self, histories: Mapping[int, Histories], next_round: int) -> None:
        """Continue with histories that were saved before round `next_round`."""
        self.histories = dict(histories)
        self._next_round = next_round


@dataclass(frozen=True)
class AttemptFilters:
    """The filters of one attempt. Threads that outlive the attempt write only here."""

    config: MergeConfig
    histories: Mapping[int, Histories]
    participants: frozenset[str]
    noted: dict[int, Histories] = field(default_factory=dict)
    """New histories of the parts that this rank has reduced in this attempt."""
    bound: Bound | None = None

    def find_outliers(
        self,
        part: int,
        names: Sequence[str],
        parts: Sequence[torch.Tensor],
        weights: Sequence[float],
        last: torch.Tensor | None,
    ) -> list[bool]:
        """Apply all filters to one part, like the function `find_outliers`, and record the norms
        of the parts that pass.
        """
        bound = self.config.max_norm_zscore
        if bound is None:
            return find_outliers(parts, weights, last, self.config)
        known = self.histories.get(part, {})
        norms = {i: norm(parts[i]) for i, weight in enumerate(weights) if weight > 0}
        anomalous = {
            i for i, length in norms.items() if is_anomalous(known.get(names[i]), length, bound)
        }
        is_outlier = find_outliers(parts, weights, last, self.config, anomalous)
        passed = [i for i in norms if not is_outlier[i]]
        updated = {names[i]: update_history(known.get(names[i]), norms[i]) for i in passed}
        self.noted[part] = {
            name: h for name, h in known.items() if name in self.participants
        } | updated
        return is_outlier


def find_outliers(
    parts: Sequence[torch.Tensor],
    weights: Sequence[float],
    last: torch.Tensor | None,
    config: MergeConfig,
    anomalous: Collection[int] = (),
) -> list[bool]:
    """Return whether each participant's part (1-D fp32) is left out of the mean, in participant
    order.

    Participants of weight zero are neither filtered nor counted. If the filters would leave out all
    others, they leave out none: the mean is then the same as in a run without filters. `last` is
    the last committed mean of the part; without it all parts pass the direction filter. `anomalous`
    are the participants that fail the z-score filter.
    """
    weighted = [index for index, weight in enumerate(weights) if weight > 0]
    failed = _find_too_long(parts, weighted, config.max_norm_ratio) | set(anomalous)
    failed |= _find_turned_away(parts, weighted, last, config.min_cosine)
    if len(failed) == len(weighted):
        failed = set()
    return [index in failed for index in range(len(parts))]


def _find_too_long(
    parts: Sequence[torch.Tensor], weighted: list[int], max_ratio: float | None
) -> set[int]:
    """Return the participants whose norm exceeds max_ratio x the median norm; none if most norms
    are zero.
    """
    if max_ratio is None:
        return set()
    norms = {index: norm(parts[index]) for index in weighted}
    # The median of two norms is their mean, so with a ratio of 2 or more neither part is left out.
    # It could not be decided which of the two is wrong.
    limit = max_ratio * median(norms.values())
    return {index for index, length in norms.items() if length > limit > 0}


def _find_turned_away(
    parts: Sequence[torch.Tensor],
    weighted: list[int],
    last: torch.Tensor | None,
    min_cosine: float | None,
) -> set[int]:
    """Return the participants whose cosine with the last mean is below min_cosine. A part of
    zeros passes.
    """
    if min_cosine is None or last is None:
        return set()
    # Compared without a division, because either norm may be zero. Then both sides are zero.
    bound = min_cosine * norm(last)
    return {
        index
        for index in weighted
        if inner_product(parts[index], last) < bound * norm(parts[index])
    }
