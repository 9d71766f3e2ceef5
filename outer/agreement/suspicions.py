"""Whom an island leaves out of the plans of a round, after attempts at it have failed.

All of it follows from plans in which this island took part and from what their participants did. So an island that was
in no plan can accuse nobody, and nobody is left out without a cause in this round:

    accused     another participant could not use its payload, or had none of it in time (`Vote.accused`)
    accuser     it accuses half or more of the others; its accusations no longer count
    differs     more than half of the participants found the same digest, and it found another one
    silent      its vote, or the receipt of a vote, did not come within the limit

Who waits for a mean says little of its reducer, which may itself wait for somebody's payload: the accusation counts
only where the reducer accuses nobody else. Of two that accuse each other either may lie: they are left out in turns,
one in rounds with an even number and the other in odd ones, so that neither keeps the other out for ever.

A commit ends all of this, except that an island whose digests differ, or that is silent, in one round after the other
is left out of the next rounds, too (`Streak`). So is an island without which alone the attempts succeed, in one round
after the other. When so many are left out that nothing can be planned, the causes so far
are forgiven (an amnesty) and all try again. When many attempts have failed, whatever the reason, each minority of the
participants is left out in turn (`left_out`), so that after a bounded number of attempts there is one without those who
make the attempts fail. The turns go by name, and in odd rounds from the end: of two islands that fail each other, as
one that refuses the plans of another, nobody can tell who lies, and so neither is always the one that is left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice
from math import comb

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Plan, Vote

MAX_AMNESTIES = 3
"""Amnesties in a round. After them, islands that all accuse each other stop."""
MAX_TIES = 3
"""Disagreements in a round, without a majority for any digest, after which the islands stop."""
MAX_DISSENTS = 3
"""Rounds in a row in which an island found another digest than the majority, after which it stops."""
MAX_ROUNDS_OUT = 64
"""Longest time, in rounds, for which a streak leaves an island out."""
ROTATE_AFTER = 6
"""Failed attempts at a round after which minorities are left out in turn."""
TURN_ATTEMPTS = 3
"""Attempts until it is the next minority's turn. Islands whose numbers of attempts differ a little still meet."""

COMPARE = "Compare their versions of torch, numpy and diloco, their processors, and test the memory of each"

Votes = Mapping[tuple[str, str], Vote]
"""Votes by (plan, island)."""


@dataclass(frozen=True)
class Streak:
    """In how many rounds in a row, of those that it took part in, an island gave the same cause to be left out."""

    count: int = 0
    until: int = 0
    """It is left out of the plans of all rounds before this one: from the second time on, of 1, 3, 7 ... rounds."""

    def add(self, round_number: int) -> "Streak":
        """The streak after one more time, when `round_number` begins."""
        return Streak(self.count + 1, round_number - 1 + min(2**self.count, MAX_ROUNDS_OUT))


@dataclass
class Suspicions:
    """The plans of this round in which an island took part, and what it knows against their participants."""

    plans: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Participants by plan, in the order of the attempts."""
    silent: dict[str, frozenset[str]] = field(default_factory=dict)
    """Participants that did not answer in time, by plan."""
    forgiven: frozenset[str] = frozenset()
    """Plans from before the last amnesty. What happened in them no longer counts."""
    num_amnesties: int = 0
    passed_over: frozenset[str] = frozenset()
    """Islands that should have made a plan and did not. Others plan until one of their plans arrives."""
    dissents: dict[str, Streak] = field(default_factory=dict)
    """Islands whose digests differed from the majority's."""
    silences: dict[str, Streak] = field(default_factory=dict)
    """Islands whose votes or receipts did not come in time."""
    hindrances: dict[str, Streak] = field(default_factory=dict)
    """Islands without which the last attempt of a round succeeded, when it was their turn to be left out."""
    round: int = 0

    def take_part(self, plan: Plan) -> None:
        """This island takes part in the plan."""
        self.plans[plan.id] = tuple(plan.names)

    def forgive(self) -> None:
        """Forget all causes so far, because nothing could be planned with them."""
        self.forgiven = frozenset(self.plans)
        for streaks in self._streaks.values():
            streaks |= {name: replace(streak, until=0) for name, streak in streaks.items()}
        self.num_amnesties += 1

    def begin_round(self, round_number: int, committed: Iterable[str], votes: Votes) -> None:
        """A new state begins: forget the attempts. `committed`: participants of the plan that this island committed."""
        silent = frozenset(chain(*(self.silent.get(plan, ()) for plan in self._counted)))
        hindrances = self._find_hindrances(frozenset(committed), votes)
        _add(self.dissents, self.find_dissenters(votes), round_number)
        _add(self.silences, silent, round_number)
        _add(self.hindrances, hindrances, round_number)
        for streaks in self._streaks.values():
            for name in committed:
                streaks.pop(name, None)
        self.round = round_number
        self.plans, self.silent, self.forgiven, self.num_amnesties = {}, {}, frozenset(), 0

    def excluded(self, round_number: int, votes: Votes) -> dict[str, str]:
        """Islands that are left out of this round's plans, with the reason."""
        reasons = {
            name: f"{what}, {streak.count} times in a row"
            for what, found in self._streaks.items()
            for name, streak in found.items()
            if streak.until > round_number
        }
        for plan in self._counted:
            reasons |= dict.fromkeys(self.silent.get(plan, ()), "its vote or receipt did not come in time")
        return reasons | self._find_accused(votes, round_number) | self.find_dissenters(votes)

    def find_dissenters(self, votes: Votes) -> dict[str, str]:
        """Participants that found another digest than more than half of a plan's participants, with both digests."""
        found = {}
        for plan in self._counted:
            cast = self._digests(plan, votes)
            digest, count = max(Counter(cast.values()).items(), key=lambda item: item[1], default=("", 0))
            if 2 * count > len(self.plans[plan]):
                differing = {name: theirs for name, theirs in cast.items() if theirs != digest}
                found |= {name: f"its digest {d[:12]} differs from {digest[:12]}" for name, d in differing.items()}
        return found

    def find_ties(self, islands: frozenset[str], votes: Votes) -> list[dict[str, str]]:
        """Digests by island of each plan with all of `islands` in which no digest had a majority."""
        plans = [plan for plan, names in self.plans.items() if islands <= frozenset(names)]
        cast = [digests for plan in plans if len(digests := self._digests(plan, votes)) == len(self.plans[plan])]
        return [digests for digests in cast if 2 * max(Counter(digests.values()).values()) <= len(digests)]

    def find_end(self, knowledge: Knowledge, votes: Votes) -> str | None:
        """Why the island of `knowledge` cannot go on, because of digests that differ, or None."""
        ties = self.find_ties(knowledge.agreeing | {knowledge.me}, votes) if len(self.plans) >= MAX_TIES else []
        if len(ties) >= MAX_TIES:
            return explain_tie(knowledge.status.round, ties)
        own = self.dissents.get(knowledge.me)
        return explain_dissent(own.count) if own is not None and own.count >= MAX_DISSENTS else None

    def left_out(self, attempt: int) -> frozenset[str]:
        """After many failed attempts: the minority of the participants whose turn it is to be left out of this one."""
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
        """Those whose turn it was to be left out of the plan that committed, if nothing else is held against them."""
        if not committed or len(self.plans) <= ROTATE_AFTER:
            return frozenset()
        return frozenset(self._islands - committed - self.excluded(self.round, votes).keys())

    def _find_accused(self, votes: Votes, round_number: int) -> dict[str, str]:
        """Accused islands, and those that accuse too many, with the reason."""
        pairs = {pair for plan in self._counted for pair in self._accusations(plan, votes)}
        most = max(((len(names) - 1) // 2 for names in self.plans.values()), default=0)
        num_accused = Counter(accuser for accuser, _ in pairs)
        false = {name: f"it accuses {count} others" for name, count in num_accused.items() if count > max(1, most)}
        believed = sorted(pair for pair in pairs if pair[0] not in false)
        by = {accused: {a for a, b in believed if b == accused} for _, accused in believed}
        if by.keys() | false.keys() != self._islands:
            pairs_alone = [(b, a) for b, them in by.items() for a in them if them == {a} and by.get(a) == {b}]
            staying = {b for b, a in pairs_alone if stays(b, a, round_number)}
            by = {b: them for b, them in by.items() if b not in staying}
        return {b: f"{min(accusers)} could not use what it sent" for b, accusers in by.items()} | false

    def _accusations(self, plan: str, votes: Votes) -> list[tuple[str, str]]:
        """Pairs of accuser and accused, both participants of the plan, without those that may follow from others."""
        names = self.plans[plan]
        noes = [votes[plan, name] for name in names if (plan, name) in votes and votes[plan, name].digest is None]
        found = {v.island: v for v in noes if v.accused in names and v.accused not in (None, v.island)}
        pairs = [(name, str(vote.accused)) for name, vote in found.items()]
        return [(a, b) for a, b in pairs if not (found[a].waits_for_means and b in found and found[b].accused != a)]

    def _digests(self, plan: str, votes: Votes) -> dict[str, str]:
        """Digests of the yes votes on a plan, by island."""
        cast = {name: votes[plan, name].digest for name in self.plans[plan] if (plan, name) in votes}
        return {name: digest for name, digest in cast.items() if digest is not None}

    @property
    def _streaks(self) -> dict[str, dict[str, Streak]]:
        """The streaks that leave islands out, by what is said of them."""
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
        """All participants of the plans that count."""
        return set(chain(*(self.plans[plan] for plan in self._counted)))


def _add(streaks: dict[str, Streak], names: Iterable[str], round_number: int) -> None:
    """These islands have given the cause once more."""
    for name in names:
        streaks[name] = streaks.get(name, Streak()).add(round_number)


def stays(island: str, other: str, round_number: int) -> bool:
    """Which of two islands that accuse each other takes part in a round: the first by name in those of even number."""
    return (island < other) == (round_number % 2 == 0)


def explain_accusations(round_number: int, reasons: Mapping[str, str]) -> str:
    """Why the run ends when no island's payload could be used."""
    said = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items()))
    return (
        f"round {round_number}: no island is left that could take part, and {MAX_AMNESTIES} further attempts with all "
        f"of them failed as well ({said}). If their losses have blown up, resume from an earlier checkpoint "
        "with a lower learning rate or stronger gradient clipping"
    )


def explain_tie(round_number: int, ties: Sequence[Mapping[str, str]]) -> str:
    """Why the run ends when islands find different digests and none of them is in the majority."""
    said = ", ".join(f"{name} {digest}" for name, digest in sorted(ties[-1].items()))
    return (
        f"round {round_number}: in {len(ties)} attempts the islands found different means from the same payloads, and "
        f"no majority found the same (digests: {said}). Some compute wrongly, and it cannot be told which. {COMPARE}"
    )


def explain_dissent(count: int) -> str:
    """Why an island ends whose digest differs from that of most others."""
    return (
        f"the means that this island computed differed from those of most other islands, {count} times in a row "
        f"(the log has the digests). {COMPARE}"
    )
