"""Which islands are ready for a round, and for which attempts. A ready message can be used in one plan only."""

from collections.abc import Collection
from dataclasses import dataclass, field

from outer.agreement.messages import Plan, Ready

NEVER = (-1, -1)


@dataclass
class ReadyTable:
    """Latest ready message of each island, and which of them a plan has used."""

    latest: dict[str, Ready] = field(default_factory=dict)
    used: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(round, attempt) of the island's last ready message that is part of a plan seen here, by island."""

    def add(self, ready: Ready) -> None:
        """Remember an island's latest ready message. A restarted island (a new incarnation) starts afresh."""
        earlier = self.latest.get(ready.island)
        if earlier is not None and earlier.incarnation != ready.incarnation:
            self.used.pop(ready.island, None)
        elif earlier is not None and _is_outdated(ready, earlier):
            return
        self.latest[ready.island] = ready

    def mark_used(self, plan: Plan) -> None:
        """Mark the ready messages in a plan as used: the next attempt needs new ones."""
        for p in plan.participants:
            self.used[p.island] = max(self.used.get(p.island, NEVER), (plan.round, max(plan.attempt, p.attempt)))

    def next_attempt(self, island: str, round_number: int) -> int:
        """First attempt at this round that no plan with a ready message of the island has used."""
        used_round, used_attempt = self.used.get(island, NEVER)
        return used_attempt + 1 if used_round == round_number else 0

    def usable(self, round_number: int, islands: Collection[str]) -> dict[str, Ready]:
        """Ready messages of these islands for this round that no plan has used yet, by island."""
        latest = {name: r for name, r in self.latest.items() if name in islands and r.round == round_number}
        return {name: r for name, r in latest.items() if (r.round, r.attempt) > self.used.get(name, NEVER)}


def _is_outdated(ready: Ready, earlier: Ready) -> bool:
    """Whether `ready` was sent before `earlier`: a contributor does not return to observing the same attempt."""
    is_same = (ready.round, ready.attempt, ready.digest) == (earlier.round, earlier.attempt, earlier.digest)
    return is_same and ready.listens and not earlier.listens
