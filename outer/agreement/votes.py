"""Memory of one island for the plans of recent rounds, bounded so that a hostile peer cannot
fill it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import (
    Outcome,
    OutcomeQuery,
    OutcomeReply,
    Plan,
    Vote,
    VoteList,
    VoteReceipt,
)
from outer.agreement.proofs.certificate import Certificate, Verify, build_certificate
from outer.errors import MessageError
from outer.network.rejections import RefusedError

MAX_PLANS = 64
"""Maximum number of plans whose votes and queries are remembered per sending island."""


@dataclass
class VoteTable:
    """Tables of this island about the plans of its round and the neighbouring rounds. Plans are
    named by `Plan.id`.
    """

    votes: dict[tuple[str, str], Vote] = field(default_factory=dict)
    """Votes by (plan, island)."""
    receipts: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """By (plan, island): the island has this island's vote; the value is the outcome it knew
    when the vote arrived."""
    replies: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """By (plan, island): the outcome that the island reported in its reply to a query."""
    outcomes: dict[str, tuple[int, Outcome]] = field(default_factory=dict)
    """(round, outcome on this island) by plan."""
    certificates: dict[str, Certificate] = field(default_factory=dict)
    """Proofs of the plans that were committed by this island or another participant, by plan."""
    query_first: dict[str, int] = field(default_factory=dict)
    """Rounds of the plans that this island commits only after an outcome query to the other
    participants, by plan."""
    num_queries: dict[str, int] = field(default_factory=dict)
    """Number of queries about plans that were unknown here, by the querying island."""

    def add(self, vote: Vote) -> None:
        """Remember a vote. Only the first vote of an island on a plan counts."""
        self.votes.setdefault((vote.plan, vote.island), vote)

    def has_dispute(self, plan: Plan) -> bool:
        """Whether islands have voted for different digests of the state to which this plan
        leads.
        """
        digests = {
            vote.digest
            for (plan_id, _), vote in self.votes.items()
            if plan_id == plan.id and vote.digest
        }
        return len(digests) > 1

    def drop_unsigned(self, plan: Plan, verify: Verify) -> None:
        """Forget yes votes that arrived before the plan and are not signed with the plan's keys."""
        early = [vote for name in plan.names if (vote := self.votes.get((plan.id, name)))]
        for vote in early:
            if not vote.is_signed(plan, verify):
                del self.votes[plan.id, vote.island]

    def certify(self, plan: Plan) -> Certificate:
        """Return the certificate of a plan that commits: another participant's, or one made of
        all votes.
        """
        if plan.id in self.certificates:
            return self.certificates[plan.id]
        votes = [self.votes[plan.id, name] for name in plan.names]
        assert votes[0].digest is not None, "all have voted yes"
        signatures = {vote.island: vote.signature or "" for vote in votes}
        self.certificates[plan.id] = made = build_certificate(
            plan.statement(votes[0].digest), signatures
        )
        return made

    def record(
        self, plan: Plan, sender: str, reply: VoteReceipt | OutcomeReply, verify: Verify
    ) -> None:
        """Remember the outcome of the plan at another participant. Raises RefusedError for a
        commit without proof.
        """
        if isinstance(reply, VoteReceipt):
            self.receipts[plan.id, sender] = reply.outcome
            return
        # A claimed commit counts as open until its proof is checked: the island has at least not
        # aborted.
        self.replies[plan.id, sender] = "open" if reply.outcome == "commit" else reply.outcome
        if reply.outcome == "commit":
            self.certificates[plan.id] = check_certificate(plan, reply.certificate, verify)
            self.replies[plan.id, sender] = "commit"

    def answer_vote(
        self, vote: Vote, knowledge: Knowledge, plan: Plan | None, *, is_own_plan: bool
    ) -> VoteReceipt:
        """Remember a peer's vote and acknowledge it. Raises MessageError for a later round, and
        like `check_room`.

        `plan`: the current plan, whose votes must be signed. `is_own_plan`: this island takes or
        took part in the plan of the vote.
        """
        if (
            plan is not None
            and vote.plan == plan.id
            and not vote.is_signed(plan, knowledge.signer.verify)
        ):
            raise RefusedError(
                "vote", f"{vote.island!r} has not signed its vote with its key in the plan"
            )
        is_near = knowledge.is_near(vote.round)
        if is_near:
            if not is_own_plan:
                self.check_room(vote.plan, vote.island)
            self.add(vote)
        elif (
            vote.round > knowledge.status.round
        ):  # An older vote is harmless: its sender was frozen or cut off.
            raise MessageError(
                f"a vote on round {vote.round}, {knowledge.me!r} is in round "
                f"{knowledge.status.round}"
            )
        return VoteReceipt(plan=vote.plan, outcome=self.outcome_of(vote.plan, is_near=is_near))

    def add_list(self, sender: str, message: VoteList, plan: Plan, verify: Verify) -> None:
        """Remember the votes of all participants. Raises MessageError unless each has signed its
        vote.
        """
        votes = message.votes(plan)
        for vote in votes:
            if not vote.is_signed(plan, verify):
                raise RefusedError(
                    "vote", f"{sender!r} forwards a vote that {vote.island!r} has not signed"
                )
        for vote in votes:
            self.add(vote)

    def settle(self, plan: Plan) -> None:
        """Record the planner's announcement that all participants have the votes of all, if this
        island has them, too.
        """
        if len(self.cast(plan)) == len(plan.names):
            for name in plan.names:
                self.receipts.setdefault((plan.id, name), "open")

    def answer_query(
        self,
        sender: str,
        query: OutcomeQuery,
        knowledge: Knowledge,
        participants: Collection[str] | None,
    ) -> OutcomeReply:
        """Return the outcome of the plan on this island, for a peer that queries it. Raises
        MessageError like `check_room`.

        `participants`: the plan's participants if this island is or was one of them, otherwise
        None.
        """
        outcome = self.outcome_of(query.plan, is_near=knowledge.is_near(query.round))
        if outcome == "open" and (participants is None or sender in participants):
            # From now on a commit on votes alone is forbidden: the peer that gets the reply "open"
            # may abort the plan.
            if participants is None and query.plan not in self.query_first:
                self.check_room(query.plan, sender)
                self.num_queries[sender] = self.num_queries.get(sender, 0) + 1
            self.query_first[query.plan] = query.round
        certificate = self.certificates.get(query.plan) if outcome == "commit" else None
        return OutcomeReply(plan=query.plan, outcome=outcome, certificate=certificate)

    def cast(self, plan: Plan) -> dict[str, Vote]:
        """Return the participants' votes on the plan that are known, by island."""
        return {name: vote for name in plan.names if (vote := self.votes.get((plan.id, name)))}

    def tally(self, plan: Plan) -> Outcome:
        """Return the outcome of the votes: abort on one no or two digests, commit when all are
        yes, otherwise open.
        """
        cast = self.cast(plan).values()
        if any(v.digest is None for v in cast) or len({v.digest for v in cast}) > 1:
            return "abort"
        return "commit" if len(cast) == len(plan.names) else "open"

    def decide(
        self, plan: Plan, reachable: frozenset[str], *, is_late: bool
    ) -> Outcome | Literal["query"]:
        """Return the outcome by the votes and receipts, or "query" if the other participants must
        be queried.

        `reachable`: the other participants that are not lost. `is_late`: missing votes are no
        longer waited for.
        """
        outcome = self.tally(plan)
        pending = self.pending(plan) & reachable
        if outcome == "abort":
            # The missing votes will tell which digest the majority has found, and which other
            # islands are accused.
            return "open" if self._is_counting(plan, reachable) and not is_late else outcome
        # A receipt contains "abort" if its sender had aborted the plan when this island's vote
        # arrived there.
        is_aborted_elsewhere = any(
            self.receipts.get((plan.id, name)) == "abort" for name in plan.names
        )
        is_doubtful = plan.id in self.query_first or is_aborted_elsewhere
        if pending and not is_doubtful and not is_late:
            return "open"
        return "commit" if outcome == "commit" and not pending and not is_doubtful else "query"

    def _is_counting(self, plan: Plan, reachable: frozenset[str]) -> bool:
        """Return whether some island is to blame for the abort, and votes of reachable participants
        are missing.

        If no single island delayed a reduce, participants that cast no vote are to blame, because a
        no ends the reduce of all.
        """
        cast = self.cast(plan).values()
        has_blame = any(vote.accused in plan.names or vote.is_stalled for vote in cast)
        has_blame = has_blame or all(vote.digest is not None for vote in cast)
        return has_blame and any((plan.id, name) not in self.votes for name in reachable)

    def resolve(self, plan: Plan, reachable: frozenset[str]) -> Outcome:
        """Return the outcome of a query: commit if any participant has committed, abort once all
        `reachable` ones have replied.
        """
        if any(self.replies.get((plan.id, name)) == "commit" for name in plan.names):
            return "commit"
        return "open" if self.without_reply(plan) & reachable else "abort"

    def forget_open(self, plan: str) -> None:
        """Forget "open" replies when another participant is lost: their senders may have since
        learned of its commit.
        """
        self.replies = {
            key: said for key, said in self.replies.items() if key[0] != plan or said != "open"
        }

    def pending(self, plan: Plan) -> frozenset[str]:
        """Return the participants whose vote is missing, or that have not acknowledged this
        island's vote.
        """
        return frozenset(
            n
            for n in plan.names
            if (plan.id, n) not in self.votes or (plan.id, n) not in self.receipts
        )

    def without_reply(self, plan: Plan) -> frozenset[str]:
        """Return the participants that have not reported the outcome of the plan."""
        return frozenset(name for name in plan.names if (plan.id, name) not in self.replies)

    def outcome_of(self, plan: str, *, is_near: bool) -> Outcome:
        """Return the outcome of the plan on this island. An unknown plan is open if its round
        `is_near`, otherwise aborted.

        A plan of a distant round is either too old or belongs to a history that this island has
        left.
        """
        return self.outcomes[plan][1] if plan in self.outcomes else "open" if is_near else "abort"

    def check_room(self, plan: str, sender: str) -> None:
        """Raise MessageError if the sender has caused MAX_PLANS other plans to be remembered
        here.
        """
        plans = {key[0] for key in self.votes if key[1] == sender}
        if plan not in plans and len(plans) + self.num_queries.get(sender, 0) >= MAX_PLANS:
            raise MessageError("too many plans are mentioned in this round")

    def prune(self, round_number: int) -> None:
        """Forget the plans of all rounds before `round_number - 1`."""
        self.votes = {k: v for k, v in self.votes.items() if v.round >= round_number - 1}
        self.query_first = {k: r for k, r in self.query_first.items() if r >= round_number - 1}
        self.outcomes = {k: v for k, v in self.outcomes.items() if v[0] >= round_number - 1}
        self.num_queries = {}
        kept = set(self.outcomes) | set(self.query_first) | {k[0] for k in self.votes}
        self.certificates = {k: v for k, v in self.certificates.items() if k in self.outcomes}
        self.replies = {k: v for k, v in self.replies.items() if k[0] in kept}
        self.receipts = {k: v for k, v in self.receipts.items() if k[0] in kept}


def check_certificate(plan: Plan, certificate: Certificate | None, verify: Verify) -> Certificate:
    """Return the certificate if it proves that all participants agreed on the plan. Raises
    RefusedError if not.
    """
    said = f"it says that the plan of round {plan.round} is committed, and shows"
    if certificate is None:
        raise RefusedError("proof", f"{said} no certificate")
    if certificate.statement != plan.statement(certificate.statement.digest):
        raise RefusedError("proof", f"{said} the certificate of something else")
    try:
        certificate.check(verify)
    except MessageError as error:
        raise RefusedError("proof", f"{said} a bad certificate: {error}") from None
    return certificate
