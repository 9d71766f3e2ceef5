"""Certificates: the statement that the participants of a plan sign when they vote yes, with all
their signatures.

A yes vote names the state that the commit leads to, because every participant computes it before it
votes. So the yes votes of all participants prove the state itself: its digest, its round, its
tokens, and the state from which it came. The proof holds even if no island has committed the state
yet.
"""

import hashlib
from collections.abc import Callable, Container, Mapping
from functools import cached_property
from typing import Annotated, NamedTuple

from pydantic import Field

from outer.errors import MessageError
from outer.identity.island_key import PublicKey, Signature
from outer.network.messages import MAX_ROUND, MAX_TOKENS, Digest, IslandName, Message

MAX_PARTICIPANTS = 1024
MAX_INTRODUCTIONS = 16

PlanId = Annotated[str, Field(max_length=32, pattern=r"^[0-9a-f]{32}$")]
"""Field of a message: `Plan.id`."""
Verify = Callable[[str, bytes, str], bool]
"""Function of (public key, text, signature): whether the key's holder has signed the text."""


class Claim(NamedTuple):
    """A committed state as an island claims to hold it."""

    round: int
    """Number of rounds committed."""
    tokens: int
    digest: str


class Statement(Message):
    """The statement that a participant signs with its yes vote: these islands take one state to
    the next.
    """

    plan: PlanId
    round: int = Field(ge=0, lt=MAX_ROUND)
    """The round that is committed, counted from 0. After the commit, `round + 1` rounds are
    committed."""
    base: Digest
    """Digest of the state before the commit."""
    base_tokens: int = Field(ge=0, lt=MAX_TOKENS)
    tokens: int = Field(ge=0, lt=MAX_TOKENS)
    """Tokens in the state after the commit."""
    digest: Digest
    """Digest of the state after the commit."""
    islands: list[IslandName] = Field(min_length=1, max_length=MAX_PARTICIPANTS)
    """The participants, in the order of their names."""
    keys: list[PublicKey] = Field(min_length=1, max_length=MAX_PARTICIPANTS)
    """Public keys of the participants, in the order of `islands`."""

    @property
    def claim(self) -> Claim:
        """The state after the commit."""
        return Claim(self.round + 1, self.tokens, self.digest)

    @cached_property
    def text(self) -> bytes:
        """The bytes that are signed: a hash of the statement, because up to 1024 signatures are
        checked against it.
        """
        return hashlib.blake2b(self.encode(), digest_size=32).digest()

    def check(self) -> None:
        """Raise MessageError unless each participant appears once with a key, and the number of
        tokens does not shrink.
        """
        if len(self.islands) != len(self.keys) or self.islands != sorted(set(self.islands)):
            raise MessageError(
                "the participants in a certificate are repeated, out of order, or without keys"
            )
        if self.tokens < self.base_tokens:
            raise MessageError(
                f"a certificate goes from {self.base_tokens} tokens back to {self.tokens}"
            )


class Certificate(Message):
    """The proof that the participants agreed on a state: a statement with the signatures of all
    of them.
    """

    statement: Statement
    signatures: list[Signature] = Field(min_length=1, max_length=MAX_PARTICIPANTS)
    """One signature per participant, in the order of `statement.islands`."""

    @property
    def claim(self) -> Claim:
        """The state that the certificate proves."""
        return self.statement.claim

    @property
    def keys(self) -> dict[str, str]:
        """The participants' keys, by island."""
        return dict(zip(self.statement.islands, self.statement.keys, strict=True))

    def check_form(self) -> None:
        """Raise MessageError unless each participant appears once, with a key and a signature."""
        self.statement.check()
        if len(self.signatures) != len(self.statement.islands):
            raise MessageError(
                f"{len(self.signatures)} signatures of {len(self.statement.islands)} participants"
            )

    def check(self, verify: Verify, first: Container[str] = ()) -> None:
        """Raise MessageError unless every participant has signed with the key in the statement.

        Signatures of the keys in `first` are checked before the others. A liar can sign for any
        number of invented islands, but not for the islands in `first`, so one check finds it out.
        """
        self.check_form()
        text = self.statement.text
        signed = zip(self.statement.islands, self.statement.keys, self.signatures, strict=True)
        for island, key, signature in sorted(signed, key=lambda each: each[1] not in first):
            if not verify(key, text, signature):
                raise MessageError(
                    f"{island} has not signed the certificate of round {self.statement.round}"
                )


def build_certificate(statement: Statement, signatures: Mapping[str, str]) -> Certificate:
    """Return the certificate of a statement that all participants have signed. `signatures`: by
    island.
    """
    return Certificate(
        statement=statement, signatures=[signatures[island] for island in statement.islands]
    )


class Proof(Message):
    """The evidence for a claim. It is also the reply to `ProofQuery`."""

    certificate: Certificate | None = None
    """None if there is no certificate, for example for a checkpoint's state that was saved
    without one."""
    introductions: list[Certificate] = Field(default=[], max_length=MAX_INTRODUCTIONS)
    """Certificates from which the signers become known, in the order in which to apply them. See
    `Witnesses`."""


class ProofQuery(Message):
    """Request for the proof of a claim to be ahead. The reply is a `Proof`."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    digest: Digest
