"""Proofs of the states that other islands claim to hold, and of this island's own state.

An island supports a claim if it has signed the claim's certificate, or claims the same state
itself. A claim to be ahead is followed when enough islands that count (witnesses.py) support it.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from outer.agreement.proofs.certificate import Certificate, Claim, Proof, ProofQuery
from outer.agreement.proofs.signer import Signer
from outer.agreement.proofs.witnesses import Witnesses
from outer.errors import MessageError

MAX_CERTIFICATES = 64


@dataclass
class Claims:
    """Certificates by claim, and the proofs requested from other islands. The values of its
    tables are immutable.
    """

    witnesses: Witnesses
    own: Certificate | None = None
    """The proof of the state that this island holds, if there is one."""
    certificates: dict[Claim, Certificate] = field(default_factory=dict)
    """Certificates of other claims, by claim. All their signatures are valid."""
    asked: dict[str, Claim] = field(default_factory=dict)
    """The claim whose proof was last requested from each island, until the island answers."""
    answered: dict[str, Claim] = field(default_factory=dict)
    """The claim whose proof was last requested from each island, once the island has answered."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(island, reason) for each proof that was not accepted and has not been logged yet."""

    @property
    def num_signers(self) -> int:
        """How many islands have signed this island's state."""
        return len(self.own.signatures) if self.own else 0

    def prove(self, claim: Claim) -> Proof:
        """Return the proof of a state that this island holds or has just committed; an empty one
        if there is none.
        """
        certificate = self._find(claim)
        return Proof(
            certificate=certificate,
            introductions=self.witnesses.introductions if certificate else [],
        )

    def hold(self, claim: Claim) -> None:
        """Record that this island now holds the state of `claim`."""
        if self.own is None or self.own.claim != claim:
            self.own = self.certificates.get(claim)
            if self.own is not None:
                self.witnesses.admit(self.own)
        rank = claim.tokens, claim.round
        others = {c: found for c, found in self.certificates.items() if c != claim}
        self.certificates = {c: found for c, found in others.items() if (c.tokens, c.round) >= rank}
        self.answered = {
            name: c for name, c in self.answered.items() if (c.tokens, c.round) >= rank
        }

    def restore(self, proof: Proof) -> None:
        """Restore the proof that was saved in a checkpoint. Call `hold` afterwards. Invalid
        certificates are ignored.
        """
        own = [] if proof.certificate is None else [proof.certificate]
        for certificate in [*proof.introductions, *own]:
            with suppress(MessageError):
                certificate.check(self._signer.verify)
                self.witnesses.admit(certificate)
                self.add(certificate)

    def add(self, certificate: Certificate) -> None:
        """Remember a certificate whose signatures are valid."""
        kept = {claim: c for claim, c in self.certificates.items() if claim != certificate.claim}
        self.certificates = dict(list(kept.items())[1 - MAX_CERTIFICATES :]) | {
            certificate.claim: certificate
        }

    def count(
        self, claim: Claim, claimants: Iterable[tuple[str, str]] = (), *, is_held_up: bool = False
    ) -> int:
        """Return how many islands that count support the claim. `claimants`: (island, key) of
        the islands that claim it.
        """
        certificate = self._find(claim)
        signers = certificate.keys.items() if certificate else ()
        return self.witnesses.count([*claimants, *signers], is_held_up=is_held_up)

    def ask(self, island: str, claim: Claim) -> ProofQuery | None:
        """Return the request for a proof of an island's claim, or None if the island has
        answered it.
        """
        if claim in self.certificates or self.answered.get(island) == claim:
            return None
        self.asked[island] = claim
        return ProofQuery(round=claim.round, digest=claim.digest)

    def answer(self, query: ProofQuery) -> Proof:
        """Return the reply to another island's request for a proof."""
        is_own = self.own is not None and (self.own.claim.round, self.own.claim.digest) == (
            query.round,
            query.digest,
        )
        return self.prove(self.own.claim) if self.own is not None and is_own else Proof()

    def receive(self, sender: str, proof: Proof, needed: int, *, is_held_up: bool = False) -> None:
        """Process an island's reply to a request for a proof. `needed`: the number of islands
        that count which must support a claim.
        """
        claim = self.asked.pop(sender, None)
        if claim is None:
            return
        self.answered[sender] = claim
        try:
            self.check(claim, proof, needed, is_held_up=is_held_up)
        except MessageError as error:
            self.refused.append(
                (sender, f"round {claim.round} with {claim.tokens} tokens: {error}")
            )

    def check(self, claim: Claim, proof: Proof, needed: int, *, is_held_up: bool = False) -> None:
        """Remember the claim's certificate. Raises MessageError if the proof does not prove the
        claim by itself.
        """
        self.witnesses.introduce(proof.introductions, needed)
        if proof.certificate is None:
            raise MessageError("there is no certificate of it")
        if proof.certificate.claim != claim:
            raise MessageError("the certificate is of another state")
        proof.certificate.check(self._signer.verify, frozenset(self.witnesses.known.values()))
        self.add(proof.certificate)
        if (num := self.count(claim, is_held_up=is_held_up)) < needed:
            raise MessageError(
                f"{num} of the {needed} islands needed, that this island knows, have signed it"
            )

    def _find(self, claim: Claim) -> Certificate | None:
        return (
            self.own
            if self.own is not None and self.own.claim == claim
            else self.certificates.get(claim)
        )

    @property
    def _signer(self) -> Signer:
        return self.witnesses.signer
