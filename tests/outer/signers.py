"""A signer without cryptography, for searches through many worlds, and certificates by any
signers.
"""

import hashlib
from collections.abc import Mapping

from outer.agreement.messages import Plan, Status, Vote
from outer.agreement.proofs.certificate import Certificate, Statement, build_certificate
from outer.agreement.proofs.claims import Claims
from outer.agreement.proofs.signer import Signer
from outer.agreement.proofs.witnesses import Witnesses


class FakeSigner:
    """Implements `outer.agreement.proofs.signer.Signer`. Whoever holds it signs for `island`, and
    for nobody else.

    The tests' liars hold their own signers only. So nobody forges a signature, although everybody
    could compute it.
    """

    def __init__(self, island: str) -> None:
        self.public = public_of(island)
        self.allowed: frozenset[str] | None = None
        """The keys that the operator lists in island.allow, if there is a list."""

    def sign(self, text: bytes) -> str:
        return _signature(self.public, text)

    def verify(self, key: str, text: bytes, signature: str) -> bool:
        return signature == _signature(key, text)

    def key_of(self, island: str) -> str | None:
        return public_of(island)

    def trusts(self, island: str, key: str) -> bool | None:
        return None if self.allowed is None else key in self.allowed


def public_of(island: str) -> str:
    """The public key of a test's island, which everybody knows."""
    return hashlib.sha256(f"key of {island}".encode()).hexdigest()


def claims_of(island: str) -> Claims:
    """The tables of an island that signs without cryptography."""
    return Claims(Witnesses(FakeSigner(island)))


def _signature(public: str, text: bytes) -> str:
    return hashlib.sha512(public.encode() + text).hexdigest()


def signed_yes(plan: Plan, island: str, digest: str) -> Vote:
    """An island's yes vote as it arrives at the others."""
    signature = FakeSigner(island).sign(plan.statement(digest).text)
    return Vote.yes(plan, island, digest).model_copy(update={"signature": signature})


def certify(status: Status, signers: Mapping[str, Signer]) -> Certificate:
    """The certificate of a state that these islands have committed, or of one that they have agreed
    to invent.
    """
    names = sorted(signers)
    statement = Statement(
        plan="0" * 32,
        round=status.round - 1,
        base="bb" * 16,
        base_tokens=status.tokens - 20,
        tokens=status.tokens,
        digest=status.digest,
        islands=names,
        keys=[signers[name].public for name in names],
    )
    return build_certificate(
        statement, {name: signers[name].sign(statement.text) for name in names}
    )
