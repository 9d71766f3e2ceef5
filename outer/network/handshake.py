"""The handshake that begins a stream. Both sides prove their island's key and, in a run with a key,
the run key.

dialer -> HELLO: its name, the group, its island key, its half of a key exchange.

acceptor -> CHALLENGE: its name, its island key, its half of the exchange, its proof.

dialer -> PROOF: its own proof.

The group is the epoch of participants to which all frames of the stream belong. A proof is a
signature over everything that either side has sent, and over the identities of the ends of an
encrypted connection: the libp2p peers, or the acceptor's TLS certificate. With a run key, the proof
also has a MAC, whose key is derived from the run key and the exchange. After the proofs each
direction has its own key, which only the two ends can compute; another holder of the run key
cannot. Every frame carries a MAC under this key, except under TLS and on libp2p without a run key,
which authenticate already.
"""

import asyncio
import hashlib
import hmac
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pydantic import Field

from outer.errors import MessageError
from outer.identity.island_key import PublicKey, Signature, verify
from outer.network.endpoints import Endpoint, Kind
from outer.network.frames import MAX_HELLO_BYTES, VERSION, Header, PeerIds, refusal_error, view_of
from outer.network.messages import IslandName, M, Message, parse
from outer.network.rejections import RefusedError, Rejections
from outer.network.run_key import FrameMacs, PeerAuth, RunKey

KEY_CURE = "compare the files of island.run_key_file"
LACKS_KEY = "has no run key, and this run needs one: set island.run_key_file"
HAS_KEY = "holds a run key, and this island has none: set island.run_key_file"

REFUSE_SECONDS = 1.0
TOLD = frozenset({"run", "version", "key", "name", "peer", "banned", "suspended"})
"""Kinds of refusals whose text is sent to the other side."""

HandshakeSide = Literal["dialer", "acceptor"]


class Hello(Message):
    """The dialer's first message. The acceptor's first message has the same fields, with an
    empty group.
    """

    island: IslandName
    group: str = Field(default="", max_length=96)
    key: PublicKey
    """The island's public key."""
    share: PublicKey
    """One side's half of the key exchange (X25519), created for this stream."""
    has_run_key: bool


class Proof(Message):
    """Proof that the sending side holds the keys."""

    signature: Signature
    mac: str = Field(max_length=64, pattern=r"^([0-9a-f]{64})?$")
    """MAC of the transcript under a key derived from the run key, or empty if there is no run
    key."""


class Challenge(Message):
    hello: Hello
    proof: Proof


class Stream(Protocol):
    """Interface of a connection that carries frames, as the handshake and the transports use it."""

    peer: str
    """Name of the other side for error messages. The stream's owner may set it, and the
    handshake adds the island."""
    peer_key: str
    """The other side's island key, once the handshake has proved it."""
    run: bytes
    peer_ids: PeerIds | None
    certificate: str
    """Hash of the acceptor's TLS certificate, or "" without TLS."""

    async def write(self, header: Header, payload: memoryview | bytes) -> None: ...

    async def read(self, max_bytes: int) -> tuple[Header, torch.Tensor]: ...

    async def finish(self) -> None: ...

    def close(self) -> None: ...

    def use_macs(self, sent: FrameMacs, received: FrameMacs) -> None: ...


async def say_hello(
    stream: Stream, me: Endpoint, auth: PeerAuth, group: str = "", to: Endpoint | None = None
) -> Endpoint:
    """Run the handshake as the dialer `me`, and return the acceptor.

    Raises MessageError if the acceptor does not prove its keys, is not `to`, or may not take part,
    and ConnectionRefusedError if it refuses.
    """
    exchange = X25519PrivateKey.generate()
    hello = _build_hello(me, auth, exchange, group)
    await stream.write(Header(Kind.HELLO, me.rank), hello.encode())
    header, payload = await stream.read(MAX_HELLO_BYTES)
    if header.kind is Kind.REFUSAL:
        raise refusal_error(payload)
    if header.kind is not Kind.CHALLENGE:
        raise RefusedError("key", f"it answers a hello with {header.kind.name}, CHALLENGE expected")
    challenge = _parse(Challenge, bytes(view_of(payload)))
    acceptor = _identify(stream, challenge.hello, header.rank)
    _check_has_run_key(acceptor, challenge.hello, auth)
    ends = stream.peer_ids, stream.certificate
    handshake = Handshake(auth.key, stream.run, me, acceptor, hello, challenge.hello, *ends)
    keys = handshake.derive(exchange, challenge.hello.share)
    # The proof is sent in any case, because the acceptor must also find out if its key differs.
    await stream.write(Header(Kind.PROOF, me.rank), keys.prove("dialer", auth).encode())
    keys.check("acceptor", challenge.proof)
    if to not in (None, acceptor):
        raise RefusedError("name", f"{acceptor} answers where {to} was expected")
    _finish(stream, auth, acceptor, keys, "dialer")
    return acceptor


async def read_hello(stream: Stream, me: Endpoint, auth: PeerAuth) -> tuple[Endpoint, str]:
    """Run the handshake as the acceptor `me`, and return the dialer and its group.

    Raises MessageError if the first frame is not a hello, or the dialer does not prove its keys or
    may not take part.
    """
    header, payload = await stream.read(MAX_HELLO_BYTES)
    if header.kind is not Kind.HELLO:
        raise RefusedError("header", f"a stream begins with {header.kind.name}, HELLO expected")
    theirs = _parse(Hello, bytes(view_of(payload)))
    dialer = _identify(stream, theirs, header.rank)
    _check_has_run_key(dialer, theirs, auth)
    exchange = X25519PrivateKey.generate()
    ours = _build_hello(me, auth, exchange)
    ends = stream.peer_ids and _swap(stream.peer_ids), stream.certificate
    handshake = Handshake(auth.key, stream.run, dialer, me, theirs, ours, *ends)
    keys = handshake.derive(exchange, theirs.share)
    challenge = Challenge(hello=ours, proof=keys.prove("acceptor", auth))
    await stream.write(Header(Kind.CHALLENGE, me.rank), challenge.encode())
    header, payload = await stream.read(MAX_HELLO_BYTES)
    if header.kind is not Kind.PROOF:
        raise RefusedError(
            "key", f"{dialer} answers a challenge with {header.kind.name}, PROOF expected"
        )
    keys.check("dialer", _parse(Proof, bytes(view_of(payload))))
    _finish(stream, auth, dialer, keys, "acceptor")
    return dialer, theirs.group


async def refuse(stream: Stream, error: MessageError, rejections: Rejections) -> None:
    """Count a refused stream. Send the reason to an island that may be able to act on it, and
    nothing to a stranger.
    """
    rejections.add_error(stream.peer, error)
    if isinstance(error, RefusedError) and error.kind in TOLD:
        await say_refusal(stream, str(error))


async def say_refusal(stream: Stream, text: str) -> None:
    """Send the other side the reason why its stream ends."""
    with suppress(OSError):  # includes a timeout and an ended connection
        async with asyncio.timeout(REFUSE_SECONDS):
            await stream.write(Header(Kind.REFUSAL), text.encode()[:MAX_HELLO_BYTES])
            # A socket that is closed with unread incoming bytes discards the bytes that it has
            # sent.
            await stream.finish()


@dataclass(frozen=True)
class Handshake:
    """The data about one stream that both sides have after two frames."""

    run_key: RunKey | None
    run: bytes
    dialer: Endpoint
    acceptor: Endpoint
    dialer_hello: Hello
    acceptor_hello: Hello
    peer_ids: PeerIds | None
    """The libp2p peer ids; `own` is the dialer's."""
    certificate: str = ""
    """Hash of the acceptor's TLS certificate, as both sides have seen it."""

    def derive(self, exchange: X25519PrivateKey, share: str) -> "HandshakeKeys":
        """Finish the key exchange with the other side's half, and return the keys. Raises
        MessageError if the half is not a valid point.
        """
        try:
            secret = exchange.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(share)))
        except ValueError:
            raise RefusedError("key", "a key exchange with a weak share") from None
        run_key = self.run_key.derive("handshake", self.run) if self.run_key is not None else b""
        return HandshakeKeys(
            self, hashlib.blake2b(secret, key=run_key, person=b"diloco exchange").digest()
        )

    @property
    def transcript(self) -> bytes:
        """Return the bytes that both sides prove. Equal handshakes always give equal bytes."""
        peers = (self.peer_ids.own, self.peer_ids.other) if self.peer_ids is not None else ()
        tls = [f"tls={self.certificate}"] if self.certificate else []
        about = [str(VERSION), self.run.hex(), str(self.dialer), str(self.acceptor), *peers, *tls]
        return b"\n".join(
            [" ".join(about).encode(), self.dialer_hello.encode(), self.acceptor_hello.encode()]
        )

    def key_of(self, side: HandshakeSide) -> str:
        return (self.dialer_hello if side == "dialer" else self.acceptor_hello).key

    def name_of(self, side: HandshakeSide) -> Endpoint:
        return self.dialer if side == "dialer" else self.acceptor


class HandshakeKeys:
    """Proofs and frame keys of one stream. Only its two ends can compute them."""

    def __init__(self, handshake: Handshake, secret: bytes) -> None:
        self.handshake = handshake
        self._secret = secret
        self._transcript = handshake.transcript

    def prove(self, side: HandshakeSide, auth: PeerAuth) -> Proof:
        """Return this side's proof. `auth` has its island key."""
        signature = auth.island.sign(f"handshake of the {side}", self._transcript)
        return Proof(signature=signature.hex(), mac=self._mac(side))

    def check(self, side: HandshakeSide, proof: Proof) -> None:
        """Raise MessageError unless `proof` is a valid proof of this side."""
        name = self.handshake.name_of(side)
        key = self.handshake.key_of(side)
        if not hmac.compare_digest(proof.mac, self._mac(side)):
            raise RefusedError(
                "key", f"{name} does not hold the run key that this island holds: {KEY_CURE}"
            )
        if not verify(
            key, f"handshake of the {side}", self._transcript, bytes.fromhex(proof.signature)
        ):
            raise RefusedError(
                "key", f"{name} does not hold the island key {key[:16]}... that it shows"
            )

    def frame_macs(self, side: HandshakeSide) -> FrameMacs:
        """Return the MACs for the frames that this side sends."""
        return FrameMacs(self._derive(f"frames of the {side}"))

    def _mac(self, side: HandshakeSide) -> str:
        return (
            self._derive(f"proof of the {side}").hex() if self.handshake.run_key is not None else ""
        )

    def _derive(self, purpose: str) -> bytes:
        data = purpose.encode() + b"\n" + self._transcript
        return hashlib.blake2b(data, key=self._secret, digest_size=32).digest()


def _build_hello(
    me: Endpoint, auth: PeerAuth, exchange: X25519PrivateKey, group: str = ""
) -> Hello:
    share = exchange.public_key().public_bytes_raw().hex()
    has_run_key = auth.key is not None
    return Hello(
        island=me.island, group=group, key=auth.island.public, share=share, has_run_key=has_run_key
    )


def _parse(model: type[M], body: bytes) -> M:
    try:
        return parse(model, body)
    except MessageError as error:
        raise RefusedError("header", str(error)) from None


def _identify(stream: Stream, hello: Hello, rank: int) -> Endpoint:
    """Return the endpoint that the other side claims to be, and add it to the stream's name for
    errors.
    """
    endpoint = Endpoint(hello.island, rank)
    stream.peer = f"{endpoint} at {stream.peer}"
    return endpoint


def _check_has_run_key(peer: Endpoint, hello: Hello, auth: PeerAuth) -> None:
    if hello.has_run_key != (auth.key is not None):
        raise RefusedError("key", f"{peer} {HAS_KEY if hello.has_run_key else LACKS_KEY}")


def _swap(peer_ids: PeerIds) -> PeerIds:
    return PeerIds(peer_ids.other, peer_ids.own)


def _finish(
    stream: Stream, auth: PeerAuth, peer: Endpoint, keys: HandshakeKeys, side: HandshakeSide
) -> None:
    """Add MACs to the frames that follow, if they are needed, and check whether the peer, whose
    keys are proved, may take part.
    """
    other: HandshakeSide = "acceptor" if side == "dialer" else "dialer"
    if not stream.certificate and (auth.key is not None or stream.peer_ids is None):
        stream.use_macs(sent=keys.frame_macs(side), received=keys.frame_macs(other))
    stream.peer_key = keys.handshake.key_of(other)
    check_access(stream, auth, peer)


def check_access(stream: Stream, auth: PeerAuth, peer: Endpoint) -> None:
    """Raise RefusedError unless the other side of the stream may still take part under its name."""
    auth.check(peer.island, stream.peer_key, stream.peer_ids.other if stream.peer_ids else "")
