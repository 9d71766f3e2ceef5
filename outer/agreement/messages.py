"""Messages of the round protocol, as plain data. state_machine.py defines how an island reacts to
each of them.

message       receiver          meaning                                                        reply
Status        all islands       "I hold this state": each second and after a change
              Status
Ready         all islands       "I could take part in an attempt at round r from this state"
              Status
Plan          its participants  "attempt a at round r is made by these islands, in this order" -
PlanNotice    its participants  "I have made a plan with this hash", if plans are forwarded    -
PlanQuery     its planner       "the plan has not come": the planner sends it                  -
Vote          its participants  "I have the mean, with this digest" or "I have none, because"
              VoteReceipt
VoteList      its participants  "these are the votes of all", from the planner or passed on
              VoteReceipt
VoteReceipt   its planner       "I have the votes of all", if another island forwarded them    -
Settled       its participants  "all have the votes of all: commit", from the planner
              VoteReceipt
OutcomeQuery  its participants  "a vote or its receipt is missing: what came of this plan?"
              OutcomeReply
ProofQuery    one that is ahead "what proves that you hold this state?"                        Proof
Goodbye       all islands       "I leave the run; do not wait for me"                          -

A participant that is ready is a contributor if it has finished its inner steps and gives a
pseudo-gradient, or an observer (`listens`) if it still trains and only receives the mean.

A yes vote is signed. The votes of all participants make a certificate of the commit
(proofs/certificate.py).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from outer.agreement.proofs.certificate import (
    Certificate,
    Claim,
    PlanId,
    Statement,
    Verify,
)
from outer.errors import MessageError
from outer.identity.island_key import PublicKey, Signature
from outer.network.endpoints import Endpoint
from outer.network.messages import (
    MAX_RANKS,
    MAX_ROUND,
    MAX_TOKENS,
    Address,
    Carriers,
    Digest,
    Incarnation,
    IslandName,
    Message,
    StepSeconds,
    check_carriers,
)
from outer.space.experts import MAX_COUNTS

Outcome = Literal["commit", "abort", "open"]
ExpertCount = Annotated[int, Field(ge=0, lt=1 << 62)]
MAX_ATTEMPT = 1 << 31
"""Upper bound of attempt numbers, so that a hostile peer's number cannot be long."""
MAX_LOSS_SCALE = 64
"""Upper bound of the logarithm of a loss scale, for the same reason."""


class Status(Message):
    """The committed state that an island holds, and whether others may wait for it in this
    round.
    """

    round: int = Field(ge=0, lt=MAX_ROUND)
    tokens: int = Field(ge=0, lt=MAX_TOKENS)
    """Tokens in all committed pseudo-gradients. Of two histories the one with more tokens
    survives."""
    digest: Digest
    """Digest of the global params, the outer momentum and the data ledger."""
    attempt: int = Field(default=0, ge=0, lt=MAX_ATTEMPT)
    """In a reply: the first attempt for which the replying island would make a plan with the
    asking island."""
    num_ready: int = Field(default=0, ge=0, le=1024)
    """In a reply of the coordinator: how many islands are ready for the asking island's round.
    After the last round: 1 if all live islands hold its state, otherwise 0."""
    is_coming: bool = True
    """False while the island lacks parts of another island's state, or is leaving: other islands
    should not wait for it."""

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of histories: the one with the higher rank survives."""
        return self.tokens, self.round

    @property
    def is_start(self) -> bool:
        """Whether this is the state with which a run begins, which no island has committed or
        signed.
        """
        return self.rank == (0, 0)

    @property
    def claim(self) -> Claim:
        """The claimed state alone, without the other fields of the status."""
        return Claim(self.round, self.tokens, self.digest)

    def agrees_with(self, other: "Status") -> bool:
        """Return whether both statuses claim the same state."""
        # This runs for every island in every decision, so it builds no tuples.
        return self is other or (
            self.digest == other.digest
            and self.tokens == other.tokens
            and self.round == other.round
        )


class Ready(Message):
    """Offer of an island to take part in a plan of `round`, as a contributor or as an observer."""

    island: IslandName
    incarnation: Incarnation
    key: PublicKey
    """The island's public key, with which it signs its vote."""
    round: int = Field(ge=0, lt=MAX_ROUND)
    attempt: int = Field(ge=0, lt=MAX_ATTEMPT)
    """First attempt that the island would take part in. One ready message can be used in one plan
    only.
    """
    tokens: int = Field(ge=0, lt=1 << 53)
    """Tokens trained since the last round to which the island contributed."""
    weight: int = Field(ge=0, lt=1 << 53)
    """Tokens trained since the island last sent the round's fragment; this is its weight in the
    mean."""
    expert_tokens: int = Field(default=0, ge=0, lt=1 << 56)
    """Tokens trained since the island last sent the fragment's experts, in a round that sends
    experts otherwise than the rest of the model.
    """
    expert_counts: list[ExpertCount] = Field(default=[], max_length=MAX_COUNTS)
    """How often these tokens chose each group of experts of the fragment, if the islands weigh by
    that in the mean (outer/space/experts.py)."""
    listens: bool = False
    """The island is an observer: it still trains, takes part without a pseudo-gradient, and
    receives the mean.
    """
    base_tokens: int = Field(ge=0, lt=MAX_TOKENS)
    """Tokens in the committed state from which the inner steps began, like `Status.tokens`."""
    digest: Digest
    """Digest of the committed state from which the inner steps began, like `Status.digest`."""
    first: int = Field(default=0, ge=0, lt=1 << 60)
    units: int = Field(default=0, ge=0, lt=1 << 53)
    """Data units that the island has read since then: the first `units` of its lease, which
    begins at `first`."""
    step_seconds: StepSeconds = 0.0
    link_kbit: int = Field(default=0, ge=0, lt=1 << 53)
    """Rate of the island's link in kbit/s, used to assign parts to reducers; 0 if it is not
    known."""
    carriers: Carriers
    earlier: Digest | None = None
    """Digest of the parts of an earlier committed state to which the island would go back,
    because its losses do not become finite again. None if it would not go back."""
    loss_scale: int | None = Field(default=None, ge=0, le=MAX_LOSS_SCALE)
    """Logarithm to base 2 of the factor by which the island multiplies its losses; None if it does
    not train in float16.
    """
    epoch: str = Field(default="", max_length=96, pattern=r"^[A-Za-z0-9._-]*$")
    """Transport group in which the island's ranks are still connected; empty if there is no such
    group.
    """
    transport_addresses: list[Address] = Field(min_length=1, max_length=MAX_RANKS)
    control_addresses: list[Address] = Field(min_length=1, max_length=MAX_RANKS)

    def check(self, num_parts: int) -> None:
        """Raise MessageError unless each part has a carrier, each rank two addresses, and an
        observer claims no progress.
        """
        if len(self.control_addresses) != len(self.transport_addresses):
            numbers = (
                f"{len(self.control_addresses)} control, {len(self.transport_addresses)} transport"
            )
            raise MessageError(
                f"island {self.island!r} gives its ranks unequal numbers of addresses: {numbers}"
            )
        if self.listens and (self.tokens or self.weight):
            raise MessageError(
                f"island {self.island!r} observes, but claims {max(self.tokens, self.weight)} "
                "tokens"
            )
        if self.listens and (self.expert_tokens or self.expert_counts):
            raise MessageError(
                f"island {self.island!r} observes, but claims {self.expert_tokens} tokens of "
                "experts"
            )
        if self.listens and self.units:
            raise MessageError(f"island {self.island!r} observes, but claims {self.units} units")
        check_carriers(self.carriers, num_parts, len(self.transport_addresses))

    @property
    def status(self) -> Status:
        return Status(round=self.round, tokens=self.base_tokens, digest=self.digest)


class Plan(Message):
    """One attempt at a round with fixed participants in a fixed order."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    attempt: int = Field(ge=0, lt=MAX_ATTEMPT)
    planner: IslandName
    participants: list[Ready] = Field(min_length=1, max_length=1024)

    @cached_property
    def names(self) -> list[str]:
        """Names of the participants in the order in which their pseudo-gradients are summed."""
        return [p.island for p in self.participants]

    @cached_property
    def keys(self) -> dict[str, str]:
        """Public keys of the participants, by island."""
        return {p.island: p.key for p in self.participants}

    @property
    def contributors(self) -> list[Ready]:
        """Participants whose pseudo-gradients enter the mean. The others are observers."""
        return [p for p in self.participants if not p.listens]

    @cached_property
    def earlier(self) -> str | None:
        """Digest of the parts to which the plan goes back, which more than half of the participants
        name.

        None if the participants average.
        """
        named = Counter(p.earlier for p in self.participants if p.earlier is not None)
        digest, number = named.most_common(1)[0] if named else (None, 0)
        return digest if 2 * number > len(self.participants) else None

    @property
    def loss_scale(self) -> int | None:
        """The smallest loss scale of the participants, with which all of them continue after a
        commit, as a logarithm to base 2; None if none has one.
        """
        return min(
            (p.loss_scale for p in self.participants if p.loss_scale is not None), default=None
        )

    @cached_property
    def id(self) -> str:
        """Hash of the whole plan, so that votes on another plan of the same attempt do not
        count.
        """
        return hashlib.sha256(self.encode()).hexdigest()[:32]

    def statement(self, digest: str) -> Statement:
        """Return the statement that a participant signs when it votes for the state with this
        digest.
        """
        if digest not in self._statements:
            base = self.participants[0]
            self._statements.clear()
            self._statements[digest] = Statement(
                plan=self.id,
                round=self.round,
                base=base.digest,
                base_tokens=base.base_tokens,
                tokens=base.base_tokens + sum(p.tokens for p in self.participants),
                digest=digest,
                islands=self.names,
                keys=[p.key for p in self.participants],
            )
        return self._statements[digest]

    @cached_property
    def _statements(self) -> dict[str, Statement]:
        """The last statement by its digest. It is kept because all votes are checked against the
        same statement.
        """
        return {}

    @cached_property
    def addresses(self) -> dict[Endpoint, str]:
        """Transport address of every endpoint of every participant."""
        return {
            Endpoint(p.island, rank): a
            for p in self.participants
            for rank, a in enumerate(p.transport_addresses)
        }


class Vote(Message):
    """Result of the reduce on one participant: yes with the state that a commit leads to, or no
    with a cause.
    """

    plan: PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)
    island: IslandName
    digest: Digest | None = None
    """Digest of the state after a commit, as `Status.digest`; None if the reduce failed or the plan
    is refused.
    """
    signature: Signature | None = None
    """The island's signature of `Plan.statement` if the vote is yes. The protocol signs when the
    vote is cast."""
    cause: str = Field(default="", max_length=2000)
    accused: IslandName | None = None
    """Participant whose payload could not be used, if one is to blame for the failed reduce."""
    waits_for_means: bool = False
    """Whether only means are missing from the accused island. It may itself be waiting for other
    islands."""
    is_stalled: bool = False
    """Whether the reduce took too long and no single island could be identified as the cause."""

    @classmethod
    def yes(cls, plan: Plan, island: str, digest: str) -> "Vote":
        return cls(plan=plan.id, round=plan.round, island=island, digest=digest)

    @classmethod
    def no(
        cls,
        plan: Plan,
        island: str,
        cause: str,
        accused: str | None = None,
        *,
        waits_for_means: bool = False,
        is_stalled: bool = False,
    ) -> "Vote":
        """Return the no vote of an island without a mean. `accused` sent an unusable payload, or
        none in time.
        """
        return cls(
            plan=plan.id,
            round=plan.round,
            island=island,
            cause=cause[:2000],
            accused=accused,
            waits_for_means=waits_for_means,
            is_stalled=is_stalled,
        )

    def signed(self, plan: Plan, sign: Callable[[bytes], str]) -> "Vote":
        """Return the vote with its signature if it is a yes; return a no unchanged."""
        if self.digest is None:
            return self
        return self.model_copy(update={"signature": sign(plan.statement(self.digest).text)})

    def is_signed(self, plan: Plan, verify: Verify) -> bool:
        """Return whether the voter has signed the vote with its key in the plan. A no needs no
        signature.
        """
        if self.digest is None:
            return True
        key = plan.keys.get(self.island)
        if key is None or self.signature is None:
            return False
        return verify(key, plan.statement(self.digest).text, self.signature)


class VoteList(Message):
    """The yes votes of all participants of a plan. The planner sends them to the participants,
    or they are forwarded.
    """

    plan: PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)
    digests: list[Digest] = Field(min_length=1, max_length=1024)
    """Digests of the voted states, one per participant, in the order of the plan."""
    signatures: list[Signature] = Field(min_length=1, max_length=1024)

    @classmethod
    def of(cls, plan: Plan, votes: Mapping[str, Vote]) -> "VoteList | None":
        """Return the list of these votes by island, or None while a vote is missing or any vote
        is a no.
        """
        cast = [votes[name] for name in plan.names if name in votes]
        if len(cast) < len(plan.names) or any(vote.digest is None for vote in cast):
            return None
        digests = [vote.digest or "" for vote in cast]
        signatures = [vote.signature or "" for vote in cast]
        return cls(plan=plan.id, round=plan.round, digests=digests, signatures=signatures)

    def votes(self, plan: Plan) -> list[Vote]:
        """Return the votes on `plan`, in its order. Raises MessageError unless there is one vote
        per participant.
        """
        if not len(self.digests) == len(self.signatures) == len(plan.names):
            raise MessageError(f"{len(self.digests)} votes for {len(plan.names)} participants")
        cast = zip(plan.names, self.digests, self.signatures, strict=True)
        return [
            Vote.yes(plan, name, digest).model_copy(update={"signature": by})
            for name, digest, by in cast
        ]


class Settled(Message):
    """The planner's announcement that all participants have acknowledged the votes of all."""

    plan: PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)


class VoteReceipt(Message):
    """Acknowledgement of a vote or of the votes of all, with the plan's outcome on the replying
    island so far.
    """

    plan: PlanId
    outcome: Outcome


class OutcomeQuery(Message):
    """Request for the outcome of a plan. An island that replies "open" must itself query the
    others before it commits.
    """

    plan: PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)


class OutcomeReply(Message):
    plan: PlanId
    outcome: Outcome
    certificate: Certificate | None = None
    """The proof of the commit, if the outcome is "commit"."""


class Goodbye(Message):
    island: IslandName
    incarnation: Incarnation
    round: int = Field(ge=0, lt=MAX_ROUND)
    steps: int = Field(ge=0, lt=1 << 53)
    """Inner steps of the round that the island had made when it left."""
