"""What counts by its signature: certificates, votes, claims to be ahead, payloads and statements of
audits, seals.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from outer.agreement.messages import Status
from outer.agreement.proofs.certificate import Certificate, Proof, Statement
from outer.agreement.proofs.claims import Claims
from outer.agreement.proofs.signer import IslandSigner
from outer.agreement.proofs.witnesses import Witnesses
from outer.audits.commitments import (
    Commitments,
    SignedDigest,
    build_statement,
    digest_of,
    sign_payload,
)
from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.config import MergeConfig
from outer.errors import MessageError, PeerLost
from outer.identity.island_key import SIGNATURE_BYTES, IslandKey, verify
from outer.identity.known_names import KnownNames
from outer.merges import build_merge
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint, Leg, Tag, Traffic
from outer.network.messages import parse
from outer.network.run_key import MAC_BYTES, PeerAuth, RunKey, seal, unseal
from outer.reduce.auditor import Auditor, _Case
from outer.reduce.filters import OutlierFilters
from outer.reduce.means import encode_mean_of
from outer.reduce.payloads import Payloads
from outer.space.layout import Space
from outer.transports.sealed import SealedTransport
from tests.fuzz.entries import Entries, Entry
from tests.fuzz.loop import LOOP, finish
from tests.fuzz.protocol import protocol_entry
from tests.fuzz.signed import NO_SIGNATURE, sign_certificates
from tests.outer.audits.plans import build_plan
from tests.outer.donors import Spec
from tests.outer.nets import key_of
from tests.outer.signers import FakeSigner, certify

RUN_KEY = RunKey(b"k" * 32)
KEYS = {key_of(name).public: key_of(name) for name in "abc"}
PLAN, PART, ELEMENTS = build_plan("abc"), 0, 64
NAMES = KnownNames()
NAMES.adopt({name: key_of(name).public for name in "abc"})
AHEAD = Status(round=5, tokens=500, digest="cc" * 8)
TAG = Tag(3, 0, Leg.REDUCE, 0)


def build_certificates() -> Entries:
    """An entry for each thing that is signed."""
    payload = bytes(range(64))
    sealed = payload + sign_payload(key_of("a"), PLAN, PART, _tensor(payload))
    proofs = [
        Proof(certificate=_certificate("b", "c")),
        Proof(certificate=_certificate("b", "x")),
        Proof(),
    ]
    introduced = Proof(
        certificate=_certificate("b", "y"), introductions=[_certificate("a", "b", "x")]
    )
    return {
        "certificate": Entry(_check_certificate, list(_statements()), is_json=True),
        "proof": Entry(
            _check_proof,
            [each.model_dump_json().encode() for each in (*proofs, introduced)],
            is_json=True,
            is_refused=True,
        ),
        "votes and claims": protocol_entry(),
        "payload": Entry(partial(_open_payload, False), [sealed, sealed[:70]]),
        "payload that is signed": Entry(partial(_open_payload, True), [payload, b""]),
        "audit": Entry(_audit, list(_audits()), (MessageError, PeerLost), is_json=True),
        "seal": Entry(
            _unseal, [b"\x01" + seal(RUN_KEY, "x", payload), b"\x00" + payload, b"\x02" + payload]
        ),
        "sealed transport": Entry(
            _receive_sealed, [b"\x00" + payload + bytes(MAC_BYTES), b"\x01" + payload]
        ),
        "public key": Entry(
            _use_public_key, [bytes.fromhex(key_of("b").public), b"\x01" + bytes(31)], (ValueError,)
        ),
    }


def _tensor(raw: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if raw
        else torch.empty(0, dtype=torch.uint8)
    )


def _statements() -> Iterator[bytes]:
    for names in ("abc", "b", "bd"):
        fields = {
            "plan": "0" * 32,
            "round": 4,
            "base": "bb" * 16,
            "base_tokens": 480,
            "tokens": 500,
            "digest": "cc" * 8,
        }
        statement = Statement(
            **fields, islands=list(names), keys=[key_of(name).public for name in names]
        )  # type: ignore[arg-type]
        yield statement.model_dump_json().encode()


def _check_certificate(body: bytes) -> None:
    """A statement, signed for those of its islands whose keys are those of a, b and c."""
    statement = parse(Statement, body)
    signer = IslandSigner(key_of("a"), NAMES, "run")
    signatures = []
    for key in statement.keys:
        own = KEYS.get(key)
        signatures.append(
            IslandSigner(own, NAMES, "run").sign(statement.text) if own else NO_SIGNATURE
        )
    certificate = Certificate(statement=statement, signatures=signatures)
    certificate.check(signer.verify, {key_of("c").public})
    assert set(statement.keys) <= KEYS.keys(), "a certificate counts that somebody has not signed"
    assert statement.islands == sorted(set(statement.islands))


def _certificate(*names: str) -> Certificate:
    """Of AHEAD, without signatures."""
    made = certify(AHEAD, {name: FakeSigner(name) for name in names})
    return made.model_copy(update={"signatures": [NO_SIGNATURE] * len(names)})


def _check_proof(body: bytes) -> None:
    """Island a knows b and c; b shows a proof, and signs for whom it likes but a and c."""
    values = None
    with suppress(ValueError, RecursionError):
        values = json.loads(body)
    sign_certificates(values, honest="a c")
    proof = parse(Proof, json.dumps(values)) if values is not None else parse(Proof, body)
    claims = Claims(Witnesses(FakeSigner("a")))
    committed = certify(
        Status(round=1, tokens=20, digest="11" * 8), {name: FakeSigner(name) for name in "abc"}
    )
    claims.add(committed)
    claims.hold(committed.claim)
    claims.check(AHEAD.claim, proof, needed=2)  # One island alone proves nothing where two commit.


def _open_payload(is_signed: bool, body: bytes) -> None:
    payload = _tensor(body)
    if is_signed:
        payload = _tensor(body + sign_payload(key_of("a"), PLAN, PART, payload))
    opened = Commitments(key_of("b"), NAMES).open(PLAN, PART, "a", payload)
    assert opened.payload.numel() == payload.numel() - SIGNATURE_BYTES
    assert verify(
        key_of("a").public, "a payload of a round", _signed_text(opened.payload), opened.signature
    )


def _signed_text(payload: torch.Tensor) -> bytes:
    return bytes.fromhex(PLAN.id) + PART.to_bytes(8) + bytes.fromhex(digest_of(payload))


PAYLOADS = Payloads(
    build_uniform_choice(build_codec("fp32")), Space([Spec("w", (ELEMENTS,))], ELEMENTS)
)


def _mean_of(shown: list[torch.Tensor]) -> torch.Tensor:
    config = MergeConfig()
    filters = OutlierFilters(config).begin(PLAN.round, PLAN.names)
    return encode_mean_of(PART, shown, PLAN, PAYLOADS, build_merge(config), filters, None)[0]


def _audits() -> Iterator[bytes]:
    """The statement of reducer b as JSON, and the payloads that it shows, in hexadecimal digits."""
    size = PAYLOADS.num_bytes(PART, of_mean=False)
    shown = [_tensor(bytes([number]) * size) for number in (0, 1, 2)]
    yield _audit_body(shown, _mean_of(shown))
    poisoned = [*shown[:2], _tensor(b"\xff" * size)]
    yield _audit_body(poisoned, _mean_of(shown))


def _audit_body(shown: list[torch.Tensor], mean: torch.Tensor) -> bytes:
    signed = [
        SignedDigest(
            digest=digest_of(each), signature=sign_payload(key_of(name), PLAN, PART, each).hex()
        )
        for name, each in zip("abc", shown, strict=True)
    ]
    statement = build_statement(key_of("b"), PLAN, PART, mean, signed).model_dump()
    texts = [each.numpy().tobytes().hex() for each in shown]
    return json.dumps(
        {"statement": statement, "shown": texts, "mean": mean.numpy().tobytes().hex()}
    ).encode()


class _Reducer:
    """The messenger of an auditor whose calls the reducer answers with what an input holds."""

    address = "a"

    def __init__(self, statement: bytes, shown: list[bytes]) -> None:
        self._statement, self._shown = statement, iter(shown)

    async def call(self, address: str, kind: str, body: bytes, **limits: Any) -> bytes:
        assert address == "b"
        reply = self._statement if kind == "statement" else next(self._shown, None)
        if reply is None:
            raise PeerLost(address, "it shows nothing more")
        return reply


def _audit(body: bytes) -> None:
    """The reducer says what is in the input, with its own signature, about the payloads that it
    shows.
    """
    try:
        values = json.loads(body)
        statement, shown = values["statement"], [bytes.fromhex(text) for text in values["shown"]]
        mean = bytes.fromhex(values["mean"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise MessageError("no audit") from None
    said = json.dumps(statement).encode()
    with suppress(MessageError):
        made = parse(type(_UNSIGNED), said)
        said = build_statement(key_of("b"), PLAN, made.part, _tensor(mean), made.payloads).encode()
    messenger: Any = _Reducer(said, shown)
    commitments = Commitments(key_of("a"), NAMES)
    auditor = Auditor(
        1.0, Endpoint("a", 0), commitments, PAYLOADS, MergeConfig(), messenger, Deadlines(1.0)
    )
    LOOP.run_until_complete(_Case(auditor, PLAN, PART, "b", _tensor(mean)).judge())
    assert _mean_of([_tensor(each) for each in shown[:3]]).numpy().tobytes() == mean, (
        "a wrong mean passes its audit"
    )


_UNSIGNED = build_statement(key_of("b"), PLAN, PART, torch.empty(0).byte(), [])


def _unseal(body: bytes) -> None:
    kind, raw = body[0] % 3 if body else 0, body[1:]
    if kind == 2:
        raw = seal(RUN_KEY, "x", raw)
    opened = unseal(RUN_KEY if kind else None, "x", raw)
    assert opened == raw or seal(RUN_KEY, "x", opened) == raw


class _Inner:
    """A transport whose payloads others may have altered."""

    max_payload_bytes, is_uneven, address = 1 << 20, False, "a"

    def __init__(self) -> None:
        self.traffic, self.payload = Traffic(), torch.empty(0).byte()

    async def connect(self, epoch: str, addresses: Any) -> None: ...
    async def disconnect(self) -> None: ...
    async def close(self) -> None: ...

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        self.payload = payload

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        if self.payload.numel() != num_bytes:
            raise MessageError("another size")
        return self.payload


def _receive_sealed(body: bytes) -> None:
    """A payload of b with the MAC that stands behind it (0), or with the one that b has made
    (1).
    """
    inner: Any = _Inner()
    is_sent, payload = body[:1] == b"\x01", body[1:]
    ends = [Endpoint(name, 0) for name in "ab"]
    a, b = (
        SealedTransport(inner, PeerAuth(RUN_KEY, island=key_of(e.island), names=NAMES), "run", e)
        for e in ends
    )
    if is_sent:
        finish(b.send(ends[0], TAG, _tensor(payload)))
    else:
        inner.payload = _tensor(payload)
    size = max(inner.payload.numel() - MAC_BYTES, 0)
    received = finish(a.recv(ends[1], TAG, size))
    assert is_sent, "a payload counts that nobody has sent"
    assert received.numpy().tobytes() == payload


def _use_public_key(raw: bytes) -> None:
    """The key of another island, which is a point of the curve or is none."""
    public = raw[:32].ljust(32, b"\0").hex()
    assert not verify(public, "x", b"body", bytes(SIGNATURE_BYTES)) or _is_weak(public)
    secret = IslandKey(b"a" * 32).pair_secret(public)
    assert len(secret) == 32 and any(secret)


def _is_weak(public: str) -> bool:
    """Whether everybody can sign for the key: it is a point of small order."""
    return verify(public, "y", b"other", bytes(SIGNATURE_BYTES))
