"""What has been said about plans: votes, questions, answers, outcomes. Tables of immutable values, bounded."""

from collections import Counter
from dataclasses import dataclass, field

from outer.errors import MessageError
from outer.rounds import Outcome, Plan, Vote

MAX_PLANS = 256
"""Of which votes and questions are remembered."""


@dataclass
class Ballot:
    """One island's memory of the plans of this round and its neighbours."""

    votes: dict[tuple[str, str], Vote] = field(default_factory=dict)
    """By plan and island."""
    answers: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """By plan and island: what it said when it was asked."""
    heard: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """By plan and island: who holds this island's vote, and what had come of the plan there when it came."""
    outcomes: dict[str, tuple[int, Outcome]] = field(default_factory=dict)
    """By plan: its round and what came of it here."""
    pledged: dict[str, int] = field(default_factory=dict)
    """Plans, with their round, that this island does not commit on votes alone."""
    accusations: dict[tuple[str, str], int] = field(default_factory=dict)
    """By accuser and accused (`Vote.accused`): the round."""

    def keep(self, vote: Vote) -> None:
        """Remember a vote; the first that an island casts on a plan counts."""
        self.votes.setdefault((vote.plan, vote.island), vote)
        if vote.accused is not None and vote.digest is None:
            self.accusations[vote.island, vote.accused] = vote.round

    def tally(self, plan: Plan) -> Outcome:
        """What the votes say: one no, or two digests, abort; all yes commit; otherwise still open."""
        cast = [vote for name in plan.names if (vote := self.votes.get((plan.id, name)))]
        if any(v.digest is None for v in cast) or len({v.digest for v in cast}) > 1:
            return "abort"
        return "commit" if len(cast) == len(plan.names) else "open"

    def pending(self, plan: Plan) -> frozenset[str]:
        """Participants whose vote has not come, or who have not said that this island's has come there."""
        return frozenset(n for n in plan.names if (plan.id, n) not in self.votes or (plan.id, n) not in self.heard)

    def unanswered(self, plan: Plan) -> frozenset[str]:
        """Participants that have not said what came of the plan."""
        return frozenset(name for name in plan.names if (plan.id, name) not in self.answers)

    def is_committed_elsewhere(self, plan: Plan) -> bool:
        """Whether a participant says that it has committed the plan."""
        return any(self.answers.get((plan.id, name)) == "commit" for name in plan.names)

    def is_aborted_elsewhere(self, plan: Plan) -> bool:
        """Whether a participant had given the plan up when this island's vote came."""
        return any(self.heard.get((plan.id, name)) == "abort" for name in plan.names)

    def shut_out(self, round_number: int) -> frozenset[str]:
        """Accused in this round by another island; and whoever accuses two, or else one could shut out all."""
        now = [pair for pair, in_round in self.accusations.items() if in_round == round_number]
        by_accuser = Counter(accuser for accuser, _ in now)
        liars = {accuser for accuser, count in by_accuser.items() if count > 1}
        return frozenset(liars | {accused for accuser, accused in now if accuser not in liars})

    def pledge(self, plan: str, round_number: int) -> None:
        """From now on it is not committed on votes alone: an island that heard it is open may abort. MessageError."""
        self.check_room(plan)
        self.pledged[plan] = round_number

    def outcome_of(self, plan: str, *, is_near: bool) -> Outcome:
        """What came of it here. One that is not near is too long ago, or of a history that this island has left."""
        return self.outcomes[plan][1] if plan in self.outcomes else "open" if is_near else "abort"

    def check_room(self, plan: str) -> None:
        """Raise MessageError unless something may be remembered of this plan."""
        known = {key[0] for key in self.votes} | set(self.pledged)
        if plan not in known and len(known) >= MAX_PLANS:
            raise MessageError("too many plans are heard of in this round")

    def forget(self, round_number: int) -> None:
        """Drop what was said of rounds before the last one."""
        self.votes = {k: v for k, v in self.votes.items() if v.round >= round_number - 1}
        self.pledged = {k: r for k, r in self.pledged.items() if r >= round_number - 1}
        self.outcomes = {k: v for k, v in self.outcomes.items() if v[0] >= round_number - 1}
        self.accusations = {k: r for k, r in self.accusations.items() if r >= round_number}
        kept = set(self.outcomes) | set(self.pledged) | {k[0] for k in self.votes}
        self.answers = {k: v for k, v in self.answers.items() if k[0] in kept}
        self.heard = {k: v for k, v in self.heard.items() if k[0] in kept}
