"""Limits for the norm of a pseudo-gradient or a mean, from this island's own current and recent
pseudo-gradients.

    limit = ratio x max(norm of this island's pseudo-gradient, median of its last norms)

Healthy islands of a run make pseudo-gradients of about one length, whatever their text is;
docs/decisions has the numbers. A much longer one means a diverged loss or a lie, and a single one
can ruin a run whose rule is the plain mean. The limit uses whole pseudo-gradients, although a
reducer sees only parts: a part may be a hundred times as long on one island as on another, because
its text alone has the words of the part.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median

LEAST_PARTICIPANTS = 3
"""With fewer participants it cannot be decided whose pseudo-gradient is wrong."""
NUM_ROUNDS = 16
"""The median is taken over this number of the last rounds."""

Lengths = Mapping[str, float]
"""L2 norms by kind of tensor (outer/space/layout.py): params, the two moments of AdamW, and
buffers."""


@dataclass(frozen=True)
class Bound:
    """The bound for one round: the largest norms that may be committed."""

    ratio: float
    """The largest allowed multiple of the typical norm; `inf` if there is no bound."""
    typical: Lengths
    """Typical norms by kind. A kind that is missing or 0 has no bound."""
    me: str = ""
    """The name of this island. It does not refuse itself: other islands do, and it then takes
    their state."""

    def limit(self, kind: str) -> float:
        """Return the largest allowed norm of this kind."""
        typical = self.typical.get(kind, 0.0)
        return self._ratio(kind) * typical if typical > 0 else inf

    def find_too_long(self, kind: str, lengths: Lengths) -> str | None:
        """Return the participant, if any, whose part exceeds both the limit and the ratio times the
        median of all.

        `lengths`: norms of one part, by participant. The median protects against wrong refusals by
        islands that have just joined, whose own norms may be small.
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
    """The norms of this island's last pseudo-gradients, which are the same on all of its ranks."""

    def __init__(self, ratio: float | None, me: str) -> None:
        self._ratio = ratio
        self._me = me
        self._last: dict[tuple[int, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=NUM_ROUNDS)
        )

    def knows(self, content: int, kinds: Collection[str]) -> bool:
        """Return whether the bound needs no current pseudo-gradient, because there are earlier
        norms, or no bound is configured.
        """
        return self._ratio is None or all(self._last[content, kind] for kind in kinds)

    def bound(self, content: int, own: Lengths) -> Bound:
        """Return the bound of a round that sends this content (`Space.content_of`). `own`: norms of
        this island's contribution, if known.
        """
        if self._ratio is None:
            return NO_BOUND
        kinds = {kind for number, kind in self._last if number == content} | own.keys()
        last = {kind: self._last[content, kind] for kind in kinds}
        return Bound(
            self._ratio,
            {k: max(own.get(k, 0.0), median(last[k] or [0.0])) for k in kinds},
            self._me,
        )

    def commit(self, content: int, own: Lengths) -> None:
        """Record the norms of a committed contribution. A norm of 0 is ignored, because the
        island contributed nothing.
        """
        for kind, length in own.items():
            if 0 < length < inf:
                self._last[content, kind].append(length)

    def forget(self) -> None:
        """Drop all norms, because the run continues from an earlier state."""
        self._last.clear()


def scale_to(weights: Mapping[str, int], island: str) -> float:
    """Return the factor, at least 1, by which a pseudo-gradient could grow if the island had
    trained on as many tokens as others.

    >>> scale_to({"a": 10, "b": 500, "c": 500}, "a")
    50.0
    """
    own = weights.get(island, 0)
    return max(1.0, median(weights.values()) / own) if own > 0 else 1.0
