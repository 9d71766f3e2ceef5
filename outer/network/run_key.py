"""The run's key: a secret that all islands of a run hold. It proves who may speak; it hides nothing.

Records are sealed with it, and both ends of a connection prove that they hold it:

    dialer   -> HELLO      its name, the group, a nonce
    acceptor -> CHALLENGE  its name, a nonce, its proof over both names and nonces
    dialer   -> PROOF      its own

From then on each direction has a key of its own, and every frame a MAC over its number, header and payload.
"""

import hashlib
import hmac
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outer.errors import InputError, MessageError
from outer.refusals import Refusals
from outer.transports.base import Endpoint

log = logging.getLogger(__name__)

MIN_KEY_BYTES = 16
NONCE_BYTES = 16
MAC_BYTES = 16
PROOF_BYTES = 32
SEAL_MAGIC = b"DLCO-sealed-1 "
"""No record or config begins like this. A seal is one line of text, so that sealed text is text."""
SEAL_BYTES = len(SEAL_MAGIC) + 2 * PROOF_BYTES + 1

Side = Literal["dialer", "acceptor"]


class RunKey:
    """Keys for each purpose, derived from one secret, which is never shown."""

    def __init__(self, secret: bytes) -> None:
        self._root = hashlib.blake2b(secret, digest_size=64, person=b"diloco run key").digest()

    def derive(self, purpose: str, *context: bytes) -> bytes:
        """32 bytes that follow from the secret, the purpose and the context alone."""
        parts = (purpose.encode(), *context)
        data = b"".join(len(part).to_bytes(8) + part for part in parts)
        return hashlib.blake2b(data, key=self._root, digest_size=32, person=b"diloco sub-key").digest()


def read_run_key(path: Path) -> RunKey:
    """The key in a file; white space around it does not count. Raises InputError."""
    cure = f"make one with `head -c 32 /dev/urandom | base64 > {path}`, and give every island the same"
    try:
        secret = path.expanduser().read_bytes().strip()
        mode = path.expanduser().stat().st_mode
    except OSError as error:
        raise InputError(f"island.run_key_file: cannot read {str(path)!r}: {error.strerror}; {cure}") from None
    if len(secret) < MIN_KEY_BYTES:
        raise InputError(
            f"island.run_key_file: {str(path)!r} holds {len(secret)} bytes, a key has at least {MIN_KEY_BYTES}; {cure}"
        )
    if mode & 0o004:
        log.warning("island.run_key_file: everybody on this machine can read %s; `chmod 600` it", path)
    return RunKey(secret)


@dataclass(frozen=True)
class Trust:
    """By what a rank tells friends from strangers, and where it counts those it has refused."""

    key: RunKey | None = None
    refusals: Refusals = field(default_factory=Refusals)
    allow: frozenset[str] = frozenset()
    """hivemind: the peer ids that may connect; empty: all."""


def run_key_in(path: str | None) -> RunKey | None:
    """The key in a config's run_key_file; None: the run has none. Raises InputError."""
    return None if path is None else read_run_key(Path(path).expanduser())


def seal(key: RunKey | None, purpose: str, body: bytes) -> bytes:
    """`body` with a proof that a holder of the key wrote it for this purpose; without a key, `body` itself."""
    if key is None:
        return body
    return _seal_line(key, purpose, body) + body


def open_sealed(key: RunKey | None, purpose: str, raw: bytes) -> bytes:
    """What was sealed. Raises MessageError when another key, or none, or another purpose did it."""
    is_sealed = raw.startswith(SEAL_MAGIC)
    if key is None:
        if is_sealed:
            raise MessageError("it is sealed with a run key, and this island has none")
        return raw
    if not is_sealed:
        raise MessageError("it is not sealed with a run key, and this island has one")
    body = raw[SEAL_BYTES:]
    if not hmac.compare_digest(raw[:SEAL_BYTES], _seal_line(key, purpose, body)):
        raise MessageError("it is sealed with another run key, or altered")
    return body


@dataclass(frozen=True)
class Handshake:
    """One connection as both of its ends see it."""

    key: RunKey
    run: bytes
    """hash_of the run and the connection's purpose."""
    dialer: Endpoint
    acceptor: Endpoint
    group: str
    nonces: bytes
    """The dialer's, then the acceptor's."""

    def proof(self, side: Side) -> bytes:
        """What this side shows the other."""
        return self._derive(f"proof of the {side}")

    def is_proved(self, side: Side, proof: bytes) -> bool:
        """Whether `proof` comes from a holder of the key."""
        return hmac.compare_digest(proof, self.proof(side))

    def frame_macs(self, side: Side) -> "FrameMacs":
        """For the frames that this side sends."""
        return FrameMacs(self._derive(f"frames of the {side}"))

    def _derive(self, purpose: str) -> bytes:
        names = f"{self.dialer}\n{self.acceptor}\n{self.group}".encode()
        return self.key.derive(purpose, self.run, names, self.nonces)


class FrameMacs:
    """The MACs of the frames of one direction, in order: none can be altered, left out, repeated or exchanged."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def begin(self) -> hashlib.blake2b:
        """The next frame's MAC, to be fed header and payload. Its digest has MAC_BYTES."""
        mac = hashlib.blake2b(self._number.to_bytes(8), key=self._key, digest_size=MAC_BYTES, person=b"diloco frame")
        self._number += 1
        return mac


def _seal_line(key: RunKey, purpose: str, body: bytes) -> bytes:
    proof = hashlib.blake2b(body, key=key.derive("seal", purpose.encode()), digest_size=PROOF_BYTES)
    return SEAL_MAGIC + proof.hexdigest().encode() + b"\n"
