"""Memory of one island about the plans of recent rounds, bounded so that a hostile peer cannot fill it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from outer.agreement.messages import Outcome, Plan, Vote
from outer.errors import MessageError

MAX_PLANS = 256
"""Maximum number of plans whose votes and queries are remembered."""


@dataclass
class VoteTable:
    """Tables of this island about the plans of its round and the neighbouring rounds. Plans are named by `Plan.id`."""

    votes: dict[tuple[str, str], Vote] = field(default_factory=dict)
    """Votes by (plan, island)."""
    receipts: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """By (plan, island): the island has this island's vote, and knew this outcome when the vote arrived."""
    replies: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """By (plan, island): the outcome that the island reported when it was queried."""
    outcomes: dict[str, tuple[int, Outcome]] = field(default_factory=dict)
    """(round, outcome on this island) by plan."""
    query_first: dict[str, int] = field(default_factory=dict)
    """Rounds of the plans that this island commits only after it has queried the other participants, by plan."""
    accusations: dict[tuple[str, str], int] = field(default_factory=dict)
    """Round of the accusation (`Vote.accused`) by (accuser, accused)."""

    def add(self, vote: Vote) -> None:
        """Remember a vote. Only the first vote of an island on a plan counts."""
        self.votes.setdefault((vote.plan, vote.island), vote)
        if vote.accused is not None and vote.digest is None:
            self.accusations[vote.island, vote.accused] = vote.round

    def tally(self, plan: Plan) -> Outcome:
        """Outcome of the votes: abort on one no or two digests, commit when all are yes, otherwise open."""
        cast = [vote for name in plan.names if (vote := self.votes.get((plan.id, name)))]
        if any(v.digest is None for v in cast) or len({v.digest for v in cast}) > 1:
            return "abort"
        return "commit" if len(cast) == len(plan.names) else "open"

    def decide(self, plan: Plan, reachable: frozenset[str], *, is_late: bool) -> Outcome | Literal["query"]:
        """Outcome according to the votes and receipts, or "query" if the other participants must be asked for it.

        `reachable`: the other participants that are not lost. `is_late`: missing votes are not waited for any longer.
        """
        outcome, pending = self.tally(plan), self.pending(plan) & reachable
        if outcome == "abort":
            return outcome
        # A receipt says "abort" if that participant had aborted the plan when this island's vote arrived there.
        is_aborted_elsewhere = any(self.receipts.get((plan.id, name)) == "abort" for name in plan.names)
        is_doubtful = plan.id in self.query_first or is_aborted_elsewhere
        if pending and not is_doubtful and not is_late:
            return "open"
        return "commit" if outcome == "commit" and not pending and not is_doubtful else "query"

    def resolve(self, plan: Plan, reachable: frozenset[str]) -> Outcome:
        """Outcome of a query: commit if any participant has committed, abort once all `reachable` ones have replied."""
        if any(self.replies.get((plan.id, name)) == "commit" for name in plan.names):
            return "commit"
        return "open" if self.without_reply(plan) & reachable else "abort"

    def pending(self, plan: Plan) -> frozenset[str]:
        """Participants whose vote is missing, or that have not acknowledged this island's vote."""
        return frozenset(n for n in plan.names if (plan.id, n) not in self.votes or (plan.id, n) not in self.receipts)

    def without_reply(self, plan: Plan) -> frozenset[str]:
        """Participants that have not reported the outcome of the plan."""
        return frozenset(name for name in plan.names if (plan.id, name) not in self.replies)

    def excluded(self, round_number: int) -> frozenset[str]:
        """Islands excluded from a round's plans: accused ones, and those that accuse several, to exclude all others."""
        now = [pair for pair, in_round in self.accusations.items() if in_round == round_number]
        by_accuser = Counter(accuser for accuser, _ in now)
        liars = {accuser for accuser, count in by_accuser.items() if count > 1}
        return frozenset(liars | {accused for accuser, accused in now if accuser not in liars})

    def outcome_of(self, plan: str, *, is_near: bool) -> Outcome:
        """Outcome of the plan on this island. An unknown plan is open if its round `is_near`, otherwise aborted.

        A plan of a distant round is either too old or belongs to a history that this island has left.
        """
        return self.outcomes[plan][1] if plan in self.outcomes else "open" if is_near else "abort"

    def check_room(self, plan: str) -> None:
        """Raise MessageError if the plan is new and MAX_PLANS plans are remembered already."""
        known = {key[0] for key in self.votes} | set(self.query_first)
        if plan not in known and len(known) >= MAX_PLANS:
            raise MessageError("too many plans are heard of in this round")

    def prune(self, round_number: int) -> None:
        """Forget the plans of all rounds before `round_number - 1`, and accusations before `round_number`."""
        self.votes = {k: v for k, v in self.votes.items() if v.round >= round_number - 1}
        self.query_first = {k: r for k, r in self.query_first.items() if r >= round_number - 1}
        self.outcomes = {k: v for k, v in self.outcomes.items() if v[0] >= round_number - 1}
        self.accusations = {k: r for k, r in self.accusations.items() if r >= round_number}
        kept = set(self.outcomes) | set(self.query_first) | {k[0] for k in self.votes}
        self.replies = {k: v for k, v in self.replies.items() if k[0] in kept}
        self.receipts = {k: v for k, v in self.receipts.items() if k[0] in kept}
