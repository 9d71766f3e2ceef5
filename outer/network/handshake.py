"""The hello that begins a stream and, in a run with a key, the handshake that proves that both sides hold the key.

    dialer   -> HELLO      its name, the group, a nonce
    acceptor -> CHALLENGE  its name, a nonce, its proof over both names and nonces
    dialer   -> PROOF      its own proof

The group is the epoch of participants that all frames of the stream belong to. After the proofs each direction has a
key of its own, and every frame carries a MAC over its number, header and payload.
"""

import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Literal

from outer.network.endpoints import ISLAND_NAME, Endpoint
from outer.network.frames import MAX_HELLO_BYTES, FrameStream, Header, Kind, refusal_error, text_of, view_of
from outer.network.rejections import RefusedError, printable
from outer.network.run_key import NONCE_BYTES, PROOF_BYTES, FrameMacs, RunKey

KEY_CURE = "compare the files of island.run_key_file"

HandshakeSide = Literal["dialer", "acceptor"]


async def say_hello(stream: FrameStream, me: Endpoint, group: str = "", to: Endpoint | None = None) -> None:
    """Send the first frame as the dialer `me`, and with a key run the handshake.

    Raises MessageError if the acceptor does not hold the key or is not `to`, ConnectionRefusedError if it refuses.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    text = "\n".join([me.island, group, *([nonce.hex()] if stream.key else [])]).encode()
    await stream.write(Header(Kind.HELLO, me.rank), text)
    if stream.key is not None:
        handshake = await _meet_acceptor(stream, stream.key, me, group, nonce)
        if to not in (None, handshake.acceptor):
            raise RefusedError("name", f"{handshake.acceptor} answers where {to} was expected")
        stream.use_macs(sent=handshake.frame_macs("dialer"), received=handshake.frame_macs("acceptor"))


async def read_hello(stream: FrameStream, me: Endpoint) -> tuple[Endpoint, str]:
    """Read the first frame as the acceptor `me`, and return the dialer and its group.

    Without a key the name is only claimed. Raises MessageError if the first frame is not a hello or the proof fails.
    """
    header, payload = await stream.read(MAX_HELLO_BYTES)
    if header.kind is not Kind.HELLO:
        raise RefusedError("header", f"a stream that begins with {header.kind.name}, HELLO expected")
    island, group, nonce = [*text_of(payload).split("\n", 2), "", ""][:3]
    source = _identify(stream, island, header.rank)
    if stream.key is not None:
        await _meet_dialer(stream, stream.key, me, source, group, nonce)
    elif nonce:
        raise RefusedError("key", "it holds a run key, and this island has none: set island.run_key_file")
    return source, group


@dataclass(frozen=True)
class Handshake:
    """Proofs and frame keys of one connection. Both ends derive the same from the run key, the names and the nonces."""

    key: RunKey
    run: bytes
    dialer: Endpoint
    acceptor: Endpoint
    group: str
    nonces: bytes
    """The dialer's nonce, then the acceptor's."""

    def proof(self, side: HandshakeSide) -> bytes:
        return self._derive(f"proof of the {side}")

    def is_proved(self, side: HandshakeSide, proof: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(side))

    def frame_macs(self, side: HandshakeSide) -> FrameMacs:
        return FrameMacs(self._derive(f"frames of the {side}"))

    def _derive(self, purpose: str) -> bytes:
        names = f"{self.dialer}\n{self.acceptor}\n{self.group}".encode()
        return self.key.derive(purpose, self.run, names, self.nonces)


async def _meet_acceptor(stream: FrameStream, key: RunKey, me: Endpoint, group: str, nonce: bytes) -> Handshake:
    header, payload = await stream.read(MAX_HELLO_BYTES)
    if header.kind is Kind.REFUSAL:
        raise refusal_error(payload)
    raw = bytes(view_of(payload))
    if header.kind is not Kind.CHALLENGE or len(raw) <= NONCE_BYTES + PROOF_BYTES:
        raise RefusedError("key", f"it answers a hello with {header.kind.name} of {len(raw)} bytes")
    its_nonce, proof = raw[:NONCE_BYTES], raw[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
    acceptor = _identify(stream, raw[NONCE_BYTES + PROOF_BYTES :].decode(errors="replace"), header.rank)
    handshake = Handshake(key, stream.run, me, acceptor, group, nonce + its_nonce)
    # The proof is sent in any case, because a side that holds another key must find out, too.
    await stream.write(Header(Kind.PROOF, me.rank), handshake.proof("dialer"))
    if not handshake.is_proved("acceptor", proof):
        raise RefusedError("key", f"{acceptor} does not hold the run key that this island holds: {KEY_CURE}")
    return handshake


async def _meet_dialer(stream: FrameStream, key: RunKey, me: Endpoint, peer: Endpoint, group: str, nonce: str) -> None:
    if not re.fullmatch(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", nonce):
        raise RefusedError("key", f"{peer} has no run key, and this run needs one: set island.run_key_file")
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    handshake = Handshake(key, stream.run, peer, me, group, bytes.fromhex(nonce) + own_nonce)
    challenge = own_nonce + handshake.proof("acceptor") + me.island.encode()
    await stream.write(Header(Kind.CHALLENGE, me.rank), challenge)
    header, payload = await stream.read(MAX_HELLO_BYTES)
    if header.kind is not Kind.PROOF or not handshake.is_proved("dialer", bytes(view_of(payload))):
        raise RefusedError("key", f"{peer} does not hold the run key that this island holds: {KEY_CURE}")
    stream.use_macs(sent=handshake.frame_macs("acceptor"), received=handshake.frame_macs("dialer"))


def _identify(stream: FrameStream, island: str, rank: int) -> Endpoint:
    """Check the name that the other side gives itself, and use it in the stream's errors."""
    if not re.fullmatch(ISLAND_NAME, island):
        raise RefusedError("header", f"a hello from {printable(island, 64)!r}, which is not an island's name")
    endpoint = Endpoint(island, rank)
    stream.peer = f"{endpoint} at {stream.peer}"
    return endpoint
