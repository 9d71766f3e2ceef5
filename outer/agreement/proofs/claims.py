"""Which states that other islands claim to hold are proved, and the proof of this island's own.

An island stands behind a claim if it has signed the claim's certificate, or claims the same state itself. A claim to be
ahead is followed when enough islands stand behind it that count (witnesses.py).
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
    """Certificates by claim, and what other islands were asked. The values of its tables are immutable."""

    witnesses: Witnesses
    own: Certificate | None = None
    """Proves the state that this island holds, if there is a proof."""
    certificates: dict[Claim, Certificate] = field(default_factory=dict)
    """Those of other claims. All their signatures are good."""
    asked: dict[str, Claim] = field(default_factory=dict)
    """The claim for whose proof an island was asked last, until it answers."""
    answered: dict[str, Claim] = field(default_factory=dict)
    """The claim for whose proof an island was asked last, once it has answered."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(island, why) for each proof that was not accepted and has not been reported yet."""

    @property
    def num_signers(self) -> int:
        """How many islands have signed this island's state."""
        return len(self.own.signatures) if self.own else 0

    def prove(self, claim: Claim) -> Proof:
        """The proof of a state that this island holds or has just committed; an empty one if there is none."""
        certificate = self._find(claim)
        return Proof(certificate=certificate, introductions=self.witnesses.introductions if certificate else [])

    def hold(self, claim: Claim) -> None:
        """This island holds the state now."""
        if self.own is None or self.own.claim != claim:
            self.own = self.certificates.get(claim)
            if self.own is not None:
                self.witnesses.admit(self.own)
        rank = claim.tokens, claim.round
        others = {c: found for c, found in self.certificates.items() if c != claim}
        self.certificates = {c: found for c, found in others.items() if (c.tokens, c.round) >= rank}
        self.answered = {name: c for name, c in self.answered.items() if (c.tokens, c.round) >= rank}

    def restore(self, proof: Proof) -> None:
        """Go on from a checkpoint that was saved with `proof`. Call `hold` afterwards. Bad certificates are ignored."""
        own = [] if proof.certificate is None else [proof.certificate]
        for certificate in [*proof.introductions, *own]:
            with suppress(MessageError):
                certificate.check(self._signer.verify)
                self.witnesses.admit(certificate)
                self.add(certificate)

    def add(self, certificate: Certificate) -> None:
        """Remember a certificate whose signatures are good."""
        kept = {claim: c for claim, c in self.certificates.items() if claim != certificate.claim}
        self.certificates = dict(list(kept.items())[1 - MAX_CERTIFICATES :]) | {certificate.claim: certificate}

    def count(self, claim: Claim, claimants: Iterable[tuple[str, str]] = (), *, is_held_up: bool = False) -> int:
        """How many islands stand behind the claim that count. `claimants`: (island, key) of those that claim it."""
        certificate = self._find(claim)
        signers = certificate.keys.items() if certificate else ()
        return self.witnesses.count([*claimants, *signers], is_held_up=is_held_up)

    def ask(self, island: str, claim: Claim) -> ProofQuery | None:
        """The question to put to an island about its claim, or None if it has been answered."""
        if claim in self.certificates or self.answered.get(island) == claim:
            return None
        self.asked[island] = claim
        return ProofQuery(round=claim.round, digest=claim.digest)

    def answer(self, query: ProofQuery) -> Proof:
        """The reply to another island."""
        is_own = self.own is not None and (self.own.claim.round, self.own.claim.digest) == (query.round, query.digest)
        return self.prove(self.own.claim) if self.own is not None and is_own else Proof()

    def receive(self, sender: str, proof: Proof, needed: int, *, is_held_up: bool = False) -> None:
        """Process the reply to a question. `needed`: how many islands that count must stand behind a claim."""
        claim = self.asked.pop(sender, None)
        if claim is None:
            return
        self.answered[sender] = claim
        try:
            self.check(claim, proof, needed, is_held_up=is_held_up)
        except MessageError as error:
            self.refused.append((sender, f"round {claim.round} with {claim.tokens} tokens: {error}"))

    def check(self, claim: Claim, proof: Proof, needed: int, *, is_held_up: bool = False) -> None:
        """Remember what the proof proves. Raises MessageError if it does not prove the claim by itself."""
        self.witnesses.introduce(proof.introductions, needed)
        if proof.certificate is None:
            raise MessageError("there is no certificate of it")
        if proof.certificate.claim != claim:
            raise MessageError("the certificate is of another state")
        proof.certificate.check(self._signer.verify, frozenset(self.witnesses.known.values()))
        self.add(proof.certificate)
        if (num := self.count(claim, is_held_up=is_held_up)) < needed:
            raise MessageError(f"{num} of the {needed} islands needed, that this island knows, have signed it")

    def _find(self, claim: Claim) -> Certificate | None:
        return self.own if self.own is not None and self.own.claim == claim else self.certificates.get(claim)

    @property
    def _signer(self) -> Signer:
        return self.witnesses.signer
