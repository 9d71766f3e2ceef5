"""Who has said that it is ready, and for which attempts: a ready is good for one plan."""

from collections.abc import Collection
from dataclasses import dataclass, field

from outer.rounds import Plan, Ready

NEVER = (-1, -1)


@dataclass
class Readies:
    """The last ready of each island, and which of them have gone into a plan."""

    said: dict[str, Ready] = field(default_factory=dict)
    used: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By island: round and attempt of its last ready that went into a plan seen here."""

    def keep(self, ready: Ready) -> None:
        """Remember an island's last word; a restarted island begins anew."""
        earlier = self.said.get(ready.island)
        if earlier is not None and earlier.incarnation != ready.incarnation:
            self.used.pop(ready.island, None)
        elif earlier is not None and _is_overtaken(ready, earlier):
            return
        self.said[ready.island] = ready

    def forget(self, island: str) -> None:
        """It has left."""
        self.said.pop(island, None)

    def use(self, plan: Plan) -> None:
        """The readies in a plan are used up: the next attempt needs new ones."""
        for p in plan.participants:
            self.used[p.island] = max(self.used.get(p.island, NEVER), (plan.round, max(plan.attempt, p.attempt)))

    def next_attempt(self, island: str, round_number: int) -> int:
        """One more than every attempt at this round that the island's readies have gone into."""
        used_round, used_attempt = self.used.get(island, NEVER)
        return used_attempt + 1 if used_round == round_number else 0

    def usable(self, round_number: int, islands: Collection[str]) -> dict[str, Ready]:
        """Those of these islands for this round that have not gone into a plan yet."""
        return {
            name: ready
            for name, ready in self.said.items()
            if name in islands
            and ready.round == round_number
            and (ready.round, ready.attempt) > self.used.get(name, NEVER)
        }


def _is_overtaken(ready: Ready, earlier: Ready) -> bool:
    """Whether it was said before the one that has come already: who has something to give listens no more."""
    is_same = (ready.round, ready.attempt, ready.digest) == (earlier.round, earlier.attempt, earlier.digest)
    return is_same and ready.listens and not earlier.listens
