"""One island's knowledge of the run: which islands are in it, which of them live, which states they
claim to hold, and which are ready.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from outer.agreement.messages import Plan, Ready, Status
from outer.agreement.proofs.certificate import Claim, Proof, ProofQuery
from outer.agreement.proofs.claims import Claims
from outer.agreement.proofs.signer import Signer
from outer.agreement.rules import MAX_AHEAD, Behind, Rules, check_ready, find_behind
from outer.errors import MessageError

MAX_ISLANDS = 1024
NEVER = (-1, -1)


class Judged(NamedTuple):
    """The islands that are not lost, sorted by whether their claims are accepted."""

    live: dict[str, Status]
    """Last known status of the islands whose claims are accepted, by island."""
    awaited: frozenset[str]
    """The islands that may take part in a round: all except those whose claims are ignored.

    An island whose claim is not proved yet is among them until it has answered the request for its
    proof without proving the claim.
    """


@dataclass
class Knowledge:
    """Tables of one island about the others. All values in them are immutable: copying the tables
    copies the state.
    """

    me: str
    rules: Rules
    status: Status
    claims: Claims
    present: frozenset[str] = frozenset()
    """The other islands in the run, whether they live or not."""
    lost: frozenset[str] = frozenset()
    """Islands that did not answer the last call."""
    reported: frozenset[str] = frozenset()
    """Islands whose status arrived after the current gathering began."""
    statuses: dict[str, Status] = field(default_factory=dict)
    """Last known status by island."""
    doubted: dict[str, Status] = field(default_factory=dict)
    """Claims to be ahead whose state no island could provide, by island; see `disbelieve`."""
    presumed: frozenset[str] = frozenset()
    """Islands whose status follows from a commit that they have signed, and whose own status has
    not confirmed it yet.
    """
    is_held_up: bool = False
    """Whether this island has been ready for the round for longer than honest islands need to
    commit one.
    """

    def add(self, islands: Iterable[str]) -> None:
        """Record other islands that are in the run."""
        self.present |= frozenset(islands) - {self.me}

    def hear(self, island: str) -> None:
        """Record that a message of the island has arrived. Raises MessageError if too many islands
        are known.
        """
        if island not in self.present and len(self.present) >= MAX_ISLANDS:
            raise MessageError(f"{self.me!r} knows of {MAX_ISLANDS} islands already")
        if island not in self.present:
            self.add([island])
        if island in self.lost:
            self.lost -= {island}

    def record(self, island: str, status: Status) -> None:
        """Record the state that the island claims to hold. Raises MessageError if its round is
        higher than the run has.
        """
        if status.round > self.rules.max_round:
            raise MessageError(
                f"{island!r} claims round {status.round}, the run has {self.rules.max_round}"
            )
        self.statuses[island] = status
        if island not in self.reported:
            self.reported |= {island}
        if island in self.presumed:
            self.presumed -= {island}

    def presume(self, islands: Iterable[str], status: Status) -> None:
        """Record that islands hold a state, or soon will: they have signed its commit together with
        this one.
        """
        rank = status.rank
        presumed = set[str]()
        for name in self.present.intersection(islands):
            known = self.statuses.get(name)
            if known is None or known.rank < rank:
                self.statuses[name] = status
                presumed.add(name)
        self.presumed |= presumed

    def hold(self, status: Status) -> None:
        """Record that this island holds another state, which comes from a commit or from donors."""
        self.is_held_up = self.is_held_up and status.round == self.status.round
        self.status = status
        self.claims.hold(status.claim)

    def forget(self, island: str) -> None:
        """Remove an island that has left the run."""
        self.present -= {island}
        self.lost -= {island}
        self.reported -= {island}
        self.presumed -= {island}
        self.statuses.pop(island, None)

    def is_near(self, round_number: int) -> bool:
        """Return whether a round differs from this island's by at most 1. Messages about other
        rounds would only fill the memory.
        """
        return abs(round_number - self.status.round) <= 1

    def judge_claims(self) -> Judged:
        """Decide which of the other islands' claims are accepted, and which islands may take part
        in a round.
        """
        live = {}
        refused = set()
        islands = self.present - self.lost
        for name, status in self.statuses.items():
            if name not in islands:
                continue
            if name not in self.doubted and status.agrees_with(self.status):
                live[name] = status  # Most islands hold this island's state.
                continue
            is_doubted = self._is_doubted(name, status)
            if not is_doubted and (not self._is_rival(status) or self.is_proved(status.claim)):
                live[name] = status
            elif is_doubted or self.claims.answered.get(name) == status.claim:
                refused.add(name)
        return Judged(live, self.present - self.lost - refused)

    @property
    def live(self) -> dict[str, Status]:
        """Last known status of the other islands that are not lost and whose claims are accepted,
        by island.
        """
        return self.judge_claims().live

    @property
    def awaited(self) -> frozenset[str]:
        """The other islands that may take part in a round. See `Judged`."""
        return self.judge_claims().awaited

    @property
    def agreeing(self) -> frozenset[str]:
        """The other live islands that hold this island's state and are coming to its next round."""
        return frozenset(
            name for name, s in self.live.items() if s.is_coming and s.agrees_with(self.status)
        )

    @property
    def has_stragglers(self) -> bool:
        """Whether a live island is behind this one, or has not yet reported that it is not."""
        return any(
            name in self.presumed or s.rank < self.status.rank for name, s in self.live.items()
        )

    def behind(self, *, is_settled: bool) -> Behind | None:
        """Return the surviving history, or None if it is this island's own. `is_settled`: all
        islands that count have reported.
        """
        return find_behind(self.me, self.status, self.live, self.weigh, is_settled=is_settled)

    def check_ready(self, ready: Ready) -> None:
        """Raise MessageError if an island's ready message makes an impossible claim or contains
        another island's key.
        """
        check_ready(ready, self.rules)
        if wrong := self.find_wrong_key([ready]):
            raise MessageError(wrong)

    def find_wrong_key(self, readies: Iterable[Ready]) -> str | None:
        """Return an error text if a ready message contains a key that does not belong to its
        island's name, otherwise None.
        """
        for ready in readies:
            owner = (
                self.signer.public if ready.island == self.me else self.signer.key_of(ready.island)
            )
            if owner not in (None, ready.key):
                return (
                    f"the name {ready.island!r} belongs to the key {owner[:16]}..., and not to "
                    f"{ready.key[:16]}..."
                )
        return None

    @property
    def signer(self) -> Signer:
        """Signs for this island, and knows the keys of the others."""
        return self.claims.witnesses.signer

    # -- proofs of claims --------------------------------------------------------------------------
    @property
    def num_needed(self) -> int:
        """The number of islands that count which must support a claim to be ahead.

        This is the quorum, but at most the number of islands that have signed this island's own
        state, because the others may continue from a run with a lower quorum. If no island has
        signed it, the limit is two, or one if this island is delayed at round 0.
        """
        quorum = 1 if self.rules.below_quorum == "continue" else max(1, self.rules.quorum)
        few = 1 if self.is_held_up and self.status.round == 0 else 2
        return min(quorum, self.claims.num_signers or few)

    def receive_proof(self, sender: str, proof: Proof) -> None:
        """Process an island's reply to the request for the proof of its claim."""
        self.claims.receive(sender, proof, self.num_needed, is_held_up=self.is_held_up)

    def is_proved(self, claim: Claim) -> bool:
        """Return whether enough islands support a claim to follow it."""
        return self.num_needed <= 1 or self._count(claim) >= self.num_needed

    def check_proof(self, claim: Claim, proof: Proof) -> None:
        """Raise MessageError unless enough islands support a claim, by this proof or by their own
        statuses.
        """
        try:
            self.claims.check(claim, proof, self.num_needed, is_held_up=self.is_held_up)
        except MessageError:
            if not self.is_proved(claim):
                raise

    def ask_for_proof(self, island: str) -> ProofQuery | None:
        """Return the request for a proof to an island that claims to be ahead, or None if its claim
        can be judged without a proof.
        """
        status = self.statuses[island]
        is_needed = self._is_rival(status) and (
            status.rank == self.status.rank or not self.is_proved(status.claim)
        )
        return self.claims.ask(island, status.claim) if is_needed else None

    def _is_rival(self, status: Status) -> bool:
        """Return whether a status claims a state that may survive this island's."""
        if status.agrees_with(self.status) or status.rank < self.status.rank:
            return False
        return not status.is_start  # No island has signed the start state.

    def _count(self, claim: Claim) -> int:
        """Return how many islands that count support a claim, this island included."""
        islands = self.present - self.lost
        claimants = [
            name for name, s in self.statuses.items() if name in islands and s.claim == claim
        ]
        keys = [(name, key) for name in claimants if (key := self.signer.key_of(name)) is not None]
        own = [(self.me, self.signer.public)] if claim == self.status.claim else []
        # Where one island is enough, all count: two islands that have never signed together would
        # each count only itself.
        return self.claims.count(
            claim, own + keys, is_held_up=self.is_held_up or self.num_needed <= 1
        )

    def weigh(self, status: Status) -> int:
        """Return how many islands that count support the state in a status."""
        return self._count(status.claim)

    def disbelieve(self, island: str, claim: Status) -> None:
        """Ignore an island's claim until `believe`, unless it claims no more than this island
        holds.

        Call it when the state of `claim` could not be taken: the island is then neither followed
        nor waited for.
        """
        self.doubted[island] = claim

    def believe(self, island: str) -> None:
        """Accept the island's claims again."""
        self.doubted.pop(island, None)

    def _is_doubted(self, island: str, status: Status) -> bool:
        doubted = self.doubted.get(island)
        if doubted is None or status.rank < self.status.rank:
            return False
        return status.rank > self.status.rank or status.claim == doubted.claim


@dataclass
class ReadyTable:
    """Latest ready message of each island, and which of them a plan has used."""

    latest: dict[str, Ready] = field(default_factory=dict)
    used: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(round, attempt) of the last ready message of each island that a plan seen here contains, by
    island.
    """

    def add(self, ready: Ready, own: tuple[int, int] = NEVER) -> None:
        """Remember an island's latest ready message. A restarted island (a new incarnation) begins
        with an empty record.

        `own`: this island's round and next attempt. Raises MessageError if the message's attempt is
        too far ahead of it.
        """
        if ready.round == own[0] and ready.attempt > own[1] + 2 * MAX_AHEAD:
            raise MessageError(
                f"attempt {ready.attempt} of {ready.island!r}, and this island's next is {own[1]}"
            )
        earlier = self.latest.get(ready.island)
        if earlier is not None and earlier.incarnation != ready.incarnation:
            self.used.pop(ready.island, None)
        elif earlier is not None and _is_outdated(ready, earlier):
            return
        self.latest[ready.island] = ready

    def mark_used(self, plan: Plan) -> None:
        """Mark the ready messages in a plan as used: the next attempt needs new ones."""
        for p in plan.participants:
            self.used[p.island] = max(
                self.used.get(p.island, NEVER), (plan.round, max(plan.attempt, p.attempt))
            )

    def mark_refused(self, plan: Plan, own: Ready | None) -> None:
        """Mark the ready messages in a plan in which this island, with its own ready message, takes
        no part.

        A refused plan may contain any attempt numbers, so they count only up to the numbers known
        here.
        """
        known = self.latest | ({own.island: own} if own is not None else {})
        for p in plan.participants:
            if p.island in known and known[p.island].round == plan.round:
                attempt = min(p.attempt, known[p.island].attempt)
                self.used[p.island] = max(self.used.get(p.island, NEVER), (plan.round, attempt))

    def next_attempt(self, island: str, round_number: int) -> int:
        """Return the first attempt at this round that no plan with a ready message of the island
        has used.
        """
        used_round, used_attempt = self.used.get(island, NEVER)
        return used_attempt + 1 if used_round == round_number else 0

    def usable(self, round_number: int, islands: Collection[str]) -> dict[str, Ready]:
        """Return the ready messages of these islands for this round that no plan has used yet, by
        island.
        """
        latest = {
            name: r
            for name, r in self.latest.items()
            if name in islands and r.round == round_number
        }
        return {
            name: r
            for name, r in latest.items()
            if (r.round, r.attempt) > self.used.get(name, NEVER)
        }


def _is_outdated(ready: Ready, earlier: Ready) -> bool:
    """Return whether `ready` was sent before `earlier`: a contributor never becomes an observer of
    the same attempt again.
    """
    is_same = (ready.round, ready.attempt, ready.digest) == (
        earlier.round,
        earlier.attempt,
        earlier.digest,
    )
    return is_same and ready.listens and not earlier.listens
