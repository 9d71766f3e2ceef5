"""Signatures of islands on the payloads of a part, which hold the part's reducer to the mean that
it sent.

contributor: signs the plan, the part and the digest of its payload; the signature follows the
payload.

reducer: signs a statement when it is audited: the mean that it sent, and the payloads from which it
was computed, each with its contributor's signature.

So no island can make it appear that a reducer received another payload than it did: a contributor's
signature proves which payload it sent, and a reducer refuses a payload without a signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from blake3 import blake3
from pydantic import Field

from outer.agreement.messages import Plan
from outer.agreement.proofs.certificate import PlanId
from outer.errors import PoisonError, TransportError
from outer.identity.island_key import SIGNATURE_BYTES, IslandKey, Signature, verify
from outer.identity.known_names import KnownNames
from outer.network.messages import Message

PAYLOAD_PURPOSE = "a payload of a round"
STATEMENT_PURPOSE = "a mean of a round"

FullDigest = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]{64}$")]
"""A whole BLAKE3 hash in hexadecimal digits."""


class SignedDigest(Message):
    """The digest of one contributor's payload of a part, with the contributor's signature."""

    digest: FullDigest
    signature: Signature


class Statement(Message):
    """A reducer's account of the mean of one part."""

    plan: PlanId
    part: int = Field(ge=0, lt=1 << 32)
    mean: FullDigest
    """Digest of the encoded mean that the reducer sent to all participants."""
    payloads: list[SignedDigest] = Field(max_length=1024)
    """The payloads from which the mean was computed, in the order of the plan's contributors."""
    signature: Signature


def digest_of(payload: torch.Tensor) -> str:
    """Digest of a payload (1-D uint8 CPU tensor), 64 hexadecimal digits of BLAKE3."""
    return blake3(payload.contiguous().numpy().data).hexdigest()


class Commitments:
    """Signs this island's payloads and checks those of other islands. Any thread may call its
    methods.
    """

    def __init__(self, key: IslandKey, names: KnownNames) -> None:
        """Create it with the island's key. `names` must know the keys of a plan's participants."""
        self.key = key
        self._names = names

    def key_of(self, island: str) -> str:
        """Return the public key of an island. Raises TransportError if it is not known here, for
        which no island is blamed.
        """
        if (key := self._names.key_of(island)) is None:
            raise TransportError(f"the key of island {island!r} is not known here")
        return key

    def seal(self, plan: Plan, part: int, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload (1-D uint8) with this island's signature appended, the form in
        which it is sent while audits are on.
        """
        signature = sign_payload(self.key, plan, part, payload)
        return torch.cat([payload, torch.frombuffer(bytearray(signature), dtype=torch.uint8)])

    def open(self, plan: Plan, part: int, island: str, sealed: torch.Tensor) -> "SignedPayload":
        """Check and remove the signature that `seal` appended. Raises PoisonError if `island`
        has not signed the payload.
        """
        payload = sealed[:-SIGNATURE_BYTES]
        signature = sealed[-SIGNATURE_BYTES:].numpy().tobytes()
        if not is_payload_signed(self.key_of(island), plan, part, digest_of(payload), signature):
            raise PoisonError(island, f"a payload of part {part} without its signature")
        return SignedPayload(payload, signature)


@dataclass(frozen=True)
class SignedPayload:
    """A contributor's encoded part (1-D uint8) and its signature, which is empty while this
    island's own part is unsigned.
    """

    payload: torch.Tensor
    signature: bytes = b""


def sign_payload(key: IslandKey, plan: Plan, part: int, payload: torch.Tensor) -> bytes:
    """Return a contributor's signature (SIGNATURE_BYTES bytes) on its payload of the part in the
    plan.
    """
    return key.sign(PAYLOAD_PURPOSE, _payload_bytes(plan.id, part, digest_of(payload)))


def is_payload_signed(public: str, plan: Plan, part: int, digest: str, signature: bytes) -> bool:
    """Return whether the holder of the key `public` has signed the payload with this digest."""
    return verify(public, PAYLOAD_PURPOSE, _payload_bytes(plan.id, part, digest), signature)


def build_statement(
    key: IslandKey, plan: Plan, part: int, mean: torch.Tensor, payloads: Sequence[SignedDigest]
) -> Statement:
    """Return the signed statement of the reducer that holds `key`, about the mean (encoded
    bytes) of these payloads.
    """
    unsigned = Statement(
        plan=plan.id, part=part, mean=digest_of(mean), payloads=list(payloads), signature="0" * 128
    )
    return unsigned.model_copy(
        update={"signature": key.sign(STATEMENT_PURPOSE, _statement_bytes(unsigned)).hex()}
    )


def is_statement_signed(public: str, statement: Statement) -> bool:
    """Return whether the holder of the key `public` has signed the statement."""
    return verify(
        public, STATEMENT_PURPOSE, _statement_bytes(statement), bytes.fromhex(statement.signature)
    )


def _payload_bytes(plan: str, part: int, digest: str) -> bytes:
    # The plan's id contains the participants' incarnations, so it belongs to one attempt of one run
    # only.
    return bytes.fromhex(plan) + part.to_bytes(8) + bytes.fromhex(digest)


def _statement_bytes(statement: Statement) -> bytes:
    own = _payload_bytes(statement.plan, statement.part, statement.mean)
    return own + b"".join(
        bytes.fromhex(each.digest + each.signature) for each in statement.payloads
    )
