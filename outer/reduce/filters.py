"""Who is let into a part's mean: participants far too long, or turned away from the last mean, are left out."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from outer.anomalies import History, is_anomalous, observed
from outer.config import MergeConfig
from outer.merges.geometry import inner_product, norm

Histories = Mapping[str, History]
"""By participant."""


class Gates:
    """One rank's, with what it remembers of the parts that it reduces: their norms, with `max_norm_zscore`.

    It remembers a part for as long as it reduces it in every round that is for it, and of no more participants than
    the last plan had. What the gates left out is not remembered, and nothing of an attempt that did not commit.
    """

    def __init__(self, config: MergeConfig) -> None:
        self._config = config
        self.histories: dict[int, Histories] = {}
        """By part, as the last commit left them."""
        self._noted: dict[int, Histories] = {}
        self._next_round = 0

    def begin(self, round_number: int, participants: Collection[str]) -> "Trial":
        """The gates of one attempt; what an earlier one noted is dropped."""
        if round_number != self._next_round:
            # Others have reduced these parts meanwhile: long ago is not of late.
            self.histories.clear()
        trial = Trial(self._config, dict(self.histories), frozenset(participants))
        self._noted = trial.noted
        return trial

    def commit(self, round_number: int, parts: Collection[int]) -> None:
        """The last attempt's round is committed; it sent these of the rank's parts, whoever reduced them."""
        for part in parts:
            self.histories.pop(part, None)
        self.histories |= self._noted
        self._noted, self._next_round = {}, round_number + 1

    def clear(self) -> None:
        """Another history of rounds is this island's now."""
        self.histories.clear()

    def load(self, histories: Mapping[int, Histories], next_round: int) -> None:
        """Go on with what was saved before this round."""
        self.histories, self._next_round = dict(histories), next_round


@dataclass(frozen=True)
class Trial:
    """The gates of one attempt: threads that outlive it note nothing anywhere else."""

    config: MergeConfig
    histories: Mapping[int, Histories]
    participants: frozenset[str]
    noted: dict[int, Histories] = field(default_factory=dict)
    """Of each part that was reduced here."""

    def left_out(
        self,
        part: int,
        names: Sequence[str],
        parts: Sequence[torch.Tensor],
        weights: Sequence[float],
        last: torch.Tensor | None,
    ) -> list[bool]:
        """As `left_out` below, of the part that these participants gave; what is let in is noted."""
        bound = self.config.max_norm_zscore
        if bound is None:
            return left_out(parts, weights, last, self.config)
        known = self.histories.get(part, {})
        norms = {i: norm(parts[i]) for i, weight in enumerate(weights) if weight > 0}
        anomalous = {i for i, length in norms.items() if is_anomalous(known.get(names[i]), length, bound)}
        out = left_out(parts, weights, last, self.config, anomalous)
        let_in = {names[i]: observed(known.get(names[i]), length) for i, length in norms.items() if not out[i]}
        self.noted[part] = {name: h for name, h in known.items() if name in self.participants} | let_in
        return out


def left_out(
    parts: Sequence[torch.Tensor],
    weights: Sequence[float],
    last: torch.Tensor | None,
    config: MergeConfig,
    anomalous: Collection[int] = (),
) -> list[bool]:
    """For each participant whether the gates leave its part out (parts are 1-D fp32, in participant order).

    Participants that weigh nothing are neither asked nor left out. When the gates would leave out all others, they
    leave out none: a round with a doubtful mean is what the run would have without gates. `last` is the last
    committed mean of the part; None passes the direction gate. `anomalous`: whom their own history leaves out.
    """
    heard = [index for index, weight in enumerate(weights) if weight > 0]
    failed = _too_long(parts, heard, config.max_norm_ratio) | _turned_away(parts, heard, last, config.min_cosine)
    failed |= set(anomalous)
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
