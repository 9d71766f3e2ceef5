"""How long a pseudo-gradient or a mean may be, by those that this island has made itself, now and in the last rounds.

    limit = ratio x the longer of: this island's pseudo-gradient, the median of its last ones

Healthy islands of a run make pseudo-gradients of about one length, whatever their text is; docs/decisions has the
numbers. A longer one comes of a loss that has blown up, or of a lie, and one is enough to end a run whose rule is the
plain mean. Lengths are those of whole pseudo-gradients, although a reducer sees parts only: a part may be a hundred
times as long on one island as on another, because its text alone has the words of the part.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median

LEAST_PARTICIPANTS = 3
"""With fewer nothing tells whose pseudo-gradient is the wrong one."""
NUM_ROUNDS = 16
"""Last rounds whose median length counts."""

Lengths = Mapping[str, float]
"""L2 norms by kind of tensor (outer/space/layout.py): params, and the two moments of AdamW."""


@dataclass(frozen=True)
class Bound:
    """What may be committed in one round."""

    ratio: float
    """A length's largest multiple of the typical one; `inf` if there is no bound."""
    typical: Lengths
    """By kind. A kind that is missing or 0 has no bound."""
    me: str = ""
    """The island that measures. It does not refuse itself: others do, and it takes their state."""

    def limit(self, kind: str) -> float:
        """The largest length of this kind."""
        typical = self.typical.get(kind, 0.0)
        return self._ratio(kind) * typical if typical > 0 else inf

    def find_too_long(self, kind: str, lengths: Lengths) -> str | None:
        """The participant of one part, if any, that is beyond the limit and this many times the others' median.

        `lengths`: of the part, by participant. The median guards islands that have just joined: what they have made
        themselves may be short.
        """
        if len(lengths) < LEAST_PARTICIPANTS:
            return None
        longest = max(lengths.keys() - {self.me}, key=lambda name: lengths[name])
        limit = max(self.limit(kind), self._ratio(kind) * median(lengths.values()))
        return longest if lengths[longest] > limit else None

    def _ratio(self, kind: str) -> float:
        return self.ratio**2 if kind == "exp_avg_sq" else self.ratio


NO_BOUND = Bound(inf, {})


class RecentLengths:
    """The lengths of this island's last pseudo-gradients, the same on all of its ranks."""

    def __init__(self, ratio: float | None, me: str) -> None:
        self._ratio, self._me = ratio, me
        self._last: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=NUM_ROUNDS))

    def knows(self, fragment: int, kinds: Collection[str]) -> bool:
        """Whether the bound needs no pseudo-gradient of now, because there are earlier ones, or no bound is wanted."""
        return self._ratio is None or all(self._last[fragment, kind] for kind in kinds)

    def bound(self, fragment: int, own: Lengths) -> Bound:
        """The bound of a round that sends the fragment. `own`: lengths of this island's contribution, if known."""
        if self._ratio is None:
            return NO_BOUND
        kinds = {kind for number, kind in self._last if number == fragment} | own.keys()
        last = {kind: self._last[fragment, kind] for kind in kinds}
        return Bound(self._ratio, {k: max(own.get(k, 0.0), median(last[k] or [0.0])) for k in kinds}, self._me)

    def commit(self, fragment: int, own: Lengths) -> None:
        """A round with this contribution is committed. One of nothing is no measure."""
        for kind, length in own.items():
            if 0 < length < inf:
                self._last[fragment, kind].append(length)

    def forget(self) -> None:
        """Drop all lengths: the run goes on from an earlier state."""
        self._last.clear()


def scale_to(weights: Mapping[str, int], island: str) -> float:
    """By how much an island's pseudo-gradient would be longer at most if it had trained on as many tokens as others.

    >>> scale_to({"a": 10, "b": 500, "c": 500}, "a")
    50.0
    """
    own = weights.get(island, 0)
    return max(1.0, median(weights.values()) / own) if own > 0 else 1.0
