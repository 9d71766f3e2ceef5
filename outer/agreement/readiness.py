"""Which islands are ready for a round, and for which attempts. A ready message can be used in one plan only."""

from collections.abc import Collection
from dataclasses import dataclass, field

from outer.agreement.messages import Plan, Ready
from outer.errors import MessageError

NEVER = (-1, -1)
MAX_AHEAD = 1 << 12
"""How far a peer may move this island's attempt number ahead at once, so that liars cannot use the numbers up."""


@dataclass
class ReadyTable:
    """Latest ready message of each island, and which of them a plan has used."""

    latest: dict[str, Ready] = field(default_factory=dict)
    used: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(round, attempt) of the island's last ready message that is part of a plan seen here, by island."""

    def add(self, ready: Ready, own: tuple[int, int] = NEVER) -> None:
        """Remember an island's latest ready message. A restarted island (a new incarnation) starts afresh.

        `own`: this island's round and next attempt. Raises MessageError if the attempt lies too far ahead of it.
        """
        if ready.round == own[0] and ready.attempt > own[1] + 2 * MAX_AHEAD:
            raise MessageError(f"attempt {ready.attempt} of {ready.island!r}, and this island's next is {own[1]}")
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

    def mark_refused(self, plan: Plan, own: Ready | None) -> None:
        """Mark the ready messages in a plan that this island, with its own ready message, takes no part in.

        A plan that is refused may claim any attempts, so they count no further than they are known here.
        """
        known = self.latest | ({own.island: own} if own is not None else {})
        for p in plan.participants:
            if p.island in known and known[p.island].round == plan.round:
                attempt = min(p.attempt, known[p.island].attempt)
                self.used[p.island] = max(self.used.get(p.island, NEVER), (plan.round, attempt))

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
