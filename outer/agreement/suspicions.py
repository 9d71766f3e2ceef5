"""Suspicions: which islands an island leaves out of a round's plans, after attempts at the round
have failed.

They follow only from plans in which this island took part and from the actions of their
participants. So an island that was in no plan can accuse no other, and an island is left out only
for a cause in this round:

accused: another participant could not use its payload, or received no payload of it in time
(`Vote.accused`).

accuser: it accuses half or more of the others; its accusations no longer count.

differs: more than half of the participants found the same digest, and it found another one.

silent: its vote, or its receipt of a vote, did not come within the limit.

A mean that is late is weak evidence against its reducer, which may itself wait for another island's
payload. Such an accusation counts only if the reducer accuses no other island. Of two islands that
accuse each other either may lie: one is left out in rounds with an even number and the other in odd
ones, so neither keeps the other out for ever.

A commit ends all suspicions with two exceptions: an island is left out of the next rounds, too, if
in several rounds in a row its digests differ or it is silent (`Streak`), or if in several rounds in
a row attempts succeed only without it. When so many islands are left out that no plan is possible,
all suspicions so far are forgotten and all islands try again. After many failed attempts, whatever
the reason, each minority of the participants is left out in turn (`left_out`). So after a bounded
number of attempts there is one without the islands that make attempts fail. The turns are in the
order of names, and in odd rounds in the opposite order. If one island refuses the plans of another,
it cannot be decided which of them lies. With the alternating order, neither of them is always the
one that is left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice
from math import comb

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Plan, Vote

MAX_AMNESTIES = 3
"""How often suspicions are forgotten in a round. After that, islands stop if all of them are
accused."""
MAX_TIES = 3
"""Attempts in a round without a majority for any digest after which the islands stop."""
MAX_DISSENTS = 3
"""Rounds in a row in which an island found another digest than the majority after which it
stops."""
MAX_ROUNDS_OUT = 64
"""Longest time, in rounds, for which a streak leaves an island out."""
ROTATE_AFTER = 6
"""Failed attempts at a round after which minorities are left out in turn."""
TURN_ATTEMPTS = 3
"""Attempts until the next minority's turn. With several attempts per turn, islands whose attempt
numbers differ a little still agree."""

COMPARE = (
    "Compare their versions of torch, numpy and diloco, their processors, and test the "
    "memory of each"
)

Votes = Mapping[tuple[str, str], Vote]
"""Votes by (plan, island)."""


@dataclass(frozen=True)
class Streak:
    """How many rounds in a row an island gave the same cause to be left out, among the rounds in
    which it took part.
    """

    count: int = 0
    until: int = 0
    """The island is left out of all rounds before this one: from the second time on, for 1, 3, 7
    ... rounds."""

    def add(self, round_number: int) -> "Streak":
        """Return the streak with one more occurrence, when `round_number` begins."""
        return Streak(self.count + 1, round_number - 1 + min(2**self.count, MAX_ROUNDS_OUT))


@dataclass
class Suspicions:
    """The plans of this round in which an island took part, and its suspicions against their
    participants.
    """

    plans: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Participants by plan, in the order of the attempts."""
    silent: dict[str, frozenset[str]] = field(default_factory=dict)
    """Participants that did not answer in time, by plan."""
    forgiven: frozenset[str] = frozenset()
    """Plans made before suspicions were last forgotten. Events in them no longer count."""
    num_amnesties: int = 0
    passed_over: frozenset[str] = frozenset()
    """Islands that should have made a plan and did not. Other islands plan until a plan of such
    an island arrives."""
    dissents: dict[str, Streak] = field(default_factory=dict)
    """Islands whose digests differed from the majority's."""
    silences: dict[str, Streak] = field(default_factory=dict)
    """Islands whose votes or receipts did not come in time."""
    hindrances: dict[str, Streak] = field(default_factory=dict)
    """Islands without which attempts succeeded, while it was their turn to be left out."""
    round: int = 0

    def take_part(self, plan: Plan) -> None:
        """Record that this island takes part in the plan."""
        self.plans[plan.id] = tuple(plan.names)

    def forgive(self) -> None:
        """Forget all suspicions so far, because no plan was possible with them."""
        self.forgiven = frozenset(self.plans)
        for streaks in self._streaks.values():
            streaks |= {name: replace(streak, until=0) for name, streak in streaks.items()}
        self.num_amnesties += 1

    def begin_round(self, round_number: int, committed: Iterable[str], votes: Votes) -> None:
        """Begin a round with a new state: forget the attempts. `committed`: participants of the
        plan that this island committed.
        """
        silent = frozenset(chain(*(self.silent.get(plan, ()) for plan in self._counted)))
        hindrances = self._find_hindrances(frozenset(committed), votes)
        _add(self.dissents, self.find_dissenters(votes), round_number)
        _add(self.silences, silent, round_number)
        _add(self.hindrances, hindrances, round_number)
        for streaks in self._streaks.values():
            for name in committed:
                streaks.pop(name, None)
        self.round = round_number
        self.plans = {}
        self.silent = {}
        self.forgiven = frozenset()
        self.num_amnesties = 0

    def excluded(self, round_number: int, votes: Votes) -> dict[str, str]:
        """Return the islands that are left out of this round's plans, with the reasons."""
        reasons = {
            name: f"{what}, {streak.count} times in a row"
            for what, found in self._streaks.items()
            for name, streak in found.items()
            if streak.until > round_number
        }
        for plan in self._counted:
            reasons |= dict.fromkeys(
                self.silent.get(plan, ()), "its vote or receipt did not come in time"
            )
        return reasons | self._find_accused(votes, round_number) | self.find_dissenters(votes)

    def find_dissenters(self, votes: Votes) -> dict[str, str]:
        """Return the participants whose digest differs from the digest of more than half of a
        plan's participants, with both digests.
        """
        found = {}
        for plan in self._counted:
            cast = self._digests(plan, votes)
            digest, count = max(
                Counter(cast.values()).items(), key=lambda item: item[1], default=("", 0)
            )
            if 2 * count > len(self.plans[plan]):
                differing = {name: theirs for name, theirs in cast.items() if theirs != digest}
                found |= {
                    name: f"its digest {d[:12]} differs from {digest[:12]}"
                    for name, d in differing.items()
                }
        return found

    def find_ties(self, islands: frozenset[str], votes: Votes) -> list[dict[str, str]]:
        """Return the digests by island for each plan with all of `islands` in which no digest
        had a majority.
        """
        plans = [plan for plan, names in self.plans.items() if islands <= frozenset(names)]
        cast = [
            digests
            for plan in plans
            if len(digests := self._digests(plan, votes)) == len(self.plans[plan])
        ]
        return [
            digests
            for digests in cast
            if 2 * max(Counter(digests.values()).values()) <= len(digests)
        ]

    def find_end(self, knowledge: Knowledge, votes: Votes) -> str | None:
        """Return why the island of `knowledge` must stop because of differing digests, or None."""
        ties = (
            self.find_ties(knowledge.agreeing | {knowledge.me}, votes)
            if len(self.plans) >= MAX_TIES
            else []
        )
        if len(ties) >= MAX_TIES:
            return explain_tie(knowledge.status.round, ties)
        own = self.dissents.get(knowledge.me)
        return explain_dissent(own.count) if own is not None and own.count >= MAX_DISSENTS else None

    def left_out(self, attempt: int) -> frozenset[str]:
        """Return the minority of the participants whose turn it is to be left out of this
        attempt, after many failed attempts.
        """
        names = sorted(set(chain(*self.plans.values())))
        sizes = range(1, (len(names) - 1) // 2 + 1)
        if len(self.plans) < ROTATE_AFTER or not sizes:
            return frozenset()
        if self.round % 2:
            names.reverse()
        first = ROTATE_AFTER // TURN_ATTEMPTS
        turn = (attempt // TURN_ATTEMPTS - first) % sum(comb(len(names), size) for size in sizes)
        minorities = chain.from_iterable(combinations(names, size) for size in sizes)
        return frozenset(next(islice(minorities, turn, None)))

    def _find_hindrances(self, committed: frozenset[str], votes: Votes) -> frozenset[str]:
        """Return the islands that were left out, in their turn, of the plan that committed and
        are suspected of nothing else.
        """
        if not committed or len(self.plans) <= ROTATE_AFTER:
            return frozenset()
        return frozenset(self._islands - committed - self.excluded(self.round, votes).keys())

    def _find_accused(self, votes: Votes, round_number: int) -> dict[str, str]:
        """Return the accused islands, and the islands that accuse too many others, with the
        reasons.
        """
        pairs = {pair for plan in self._counted for pair in self._accusations(plan, votes)}
        most = max(((len(names) - 1) // 2 for names in self.plans.values()), default=0)
        num_accused = Counter(accuser for accuser, _ in pairs)
        false = {
            name: f"it accuses {count} others"
            for name, count in num_accused.items()
            if count > max(1, most)
        }
        believed = sorted(pair for pair in pairs if pair[0] not in false)
        by = {accused: {a for a, b in believed if b == accused} for _, accused in believed}
        if by.keys() | false.keys() != self._islands:
            pairs_alone = [
                (b, a) for b, them in by.items() for a in them if them == {a} and by.get(a) == {b}
            ]
            staying = {b for b, a in pairs_alone if stays(b, a, round_number)}
            by = {b: them for b, them in by.items() if b not in staying}
        return {
            b: f"{min(accusers)} could not use what it sent" for b, accusers in by.items()
        } | false

    def _accusations(self, plan: str, votes: Votes) -> list[tuple[str, str]]:
        """Return pairs of accuser and accused, both participants of the plan.

        Left out are accusations over missing means whose reducer accuses another island itself.
        """
        names = self.plans[plan]
        noes = [
            votes[plan, name]
            for name in names
            if (plan, name) in votes and votes[plan, name].digest is None
        ]
        found = {
            v.island: v for v in noes if v.accused in names and v.accused not in (None, v.island)
        }
        pairs = [(name, str(vote.accused)) for name, vote in found.items()]
        return [
            (a, b)
            for a, b in pairs
            if not (found[a].waits_for_means and b in found and found[b].accused != a)
        ]

    def _digests(self, plan: str, votes: Votes) -> dict[str, str]:
        """Digests of the yes votes on a plan, by island."""
        cast = {
            name: votes[plan, name].digest for name in self.plans[plan] if (plan, name) in votes
        }
        return {name: digest for name, digest in cast.items() if digest is not None}

    @property
    def _streaks(self) -> dict[str, dict[str, Streak]]:
        """The streaks that leave islands out, by their descriptions."""
        return {
            "its digests differed": self.dissents,
            "it was silent": self.silences,
            "only without it attempts succeeded": self.hindrances,
        }

    @property
    def _counted(self) -> list[str]:
        return [plan for plan in self.plans if plan not in self.forgiven]

    @property
    def _islands(self) -> set[str]:
        """All participants of the plans whose events count."""
        return set(chain(*(self.plans[plan] for plan in self._counted)))


def _add(streaks: dict[str, Streak], names: Iterable[str], round_number: int) -> None:
    """Add one occurrence to the streaks of these islands."""
    for name in names:
        streaks[name] = streaks.get(name, Streak()).add(round_number)


def stays(island: str, other: str, round_number: int) -> bool:
    """Return whether `island` takes part in a round when it and `other` accuse each other.

    In rounds with an even number the first by name takes part, in odd ones the other.
    """
    return (island < other) == (round_number % 2 == 0)


def explain_accusations(round_number: int, reasons: Mapping[str, str]) -> str:
    """Return the error text for the end of a run in which no island's payload could be used."""
    said = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items()))
    return (
        f"round {round_number}: no island is left that could take part, and {MAX_AMNESTIES} "
        f"further attempts with all of them failed as well ({said}). If their losses have blown "
        "up, resume from an earlier checkpoint with a lower learning rate or stronger gradient "
        "clipping"
    )


def explain_tie(round_number: int, ties: Sequence[Mapping[str, str]]) -> str:
    """Return the error text for the end of a run whose islands find different digests without a
    majority.
    """
    said = ", ".join(f"{name} {digest}" for name, digest in sorted(ties[-1].items()))
    return (
        f"round {round_number}: in {len(ties)} attempts the islands found different means from the "
        f"same payloads, and no majority found the same (digests: {said}). Some compute wrongly, "
        f"and it cannot be told which. {COMPARE}"
    )


def explain_dissent(count: int) -> str:
    """Return the error text for the end of an island whose digest differs from most others'."""
    return (
        f"the means that this island computed differed from those of most other islands, {count} "
        f"times in a row (the log has the digests). {COMPARE}"
    )
