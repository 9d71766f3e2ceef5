"""The run key, a secret of all islands of a run. It authenticates records and frames but does not
encrypt them.
"""

import hashlib
import hmac
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from outer.errors import InputError, MessageError
from outer.identity.access import Access
from outer.identity.island_key import IslandKey
from outer.identity.known_names import KnownNames
from outer.network.rejections import MAX_MALFORMED, RefusedError, Rejections, Suspensions

log = logging.getLogger(__name__)

MIN_KEY_BYTES = 16
MAC_BYTES = 16
PROOF_BYTES = 32
NAME_CURE = "an island that has lost its key takes another island.name"
SEAL_MAGIC = b"DLCO-sealed-1 "
"""Prefix of a seal. No record or config begins with these bytes. A seal is one line of text, so
that sealed text remains text."""
SEAL_BYTES = len(SEAL_MAGIC) + 2 * PROOF_BYTES + 1


class RunKey:
    """Derives a key for each purpose from one secret, which is never exposed by this object."""

    def __init__(self, secret: bytes) -> None:
        self._root = hashlib.blake2b(secret, digest_size=64, person=b"diloco run key").digest()

    def derive(self, purpose: str, *context: bytes) -> bytes:
        """Derive a key of 32 bytes from the secret, the purpose and the context."""
        parts = (purpose.encode(), *context)
        data = b"".join(len(part).to_bytes(8) + part for part in parts)
        return hashlib.blake2b(
            data, key=self._root, digest_size=32, person=b"diloco sub-key"
        ).digest()


def read_run_key(path: Path) -> RunKey:
    """Read a key from a file, without surrounding white space. Raises InputError."""
    path = Path(
        os.path.expanduser(path)
    )  # unlike Path.expanduser it keeps ~ if there is no home directory
    cure = (
        f"create one with `head -c 32 /dev/urandom | base64 > {path}`, and give every island "
        "the same"
    )
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise InputError(
            f"island.run_key_file: cannot read {str(path)!r}: {error.strerror}; {cure}"
        ) from None
    if len(secret) < MIN_KEY_BYTES:
        raise InputError(
            f"island.run_key_file: {str(path)!r} holds {len(secret)} bytes, a key has at least "
            f"{MIN_KEY_BYTES}; {cure}"
        )
    if mode & 0o004:
        log.warning(
            "island.run_key_file: all users of this machine can read %s; run `chmod 600` on it",
            path,
        )
    return RunKey(secret)


@dataclass(frozen=True)
class PeerAuth:
    """The means by which a rank authenticates its peers, and its counters of rejected messages
    and connections.
    """

    key: RunKey | None = None
    rejections: Rejections = field(default_factory=Rejections)
    island: IslandKey = field(default_factory=IslandKey.generate)
    """This island's own key. By default a key is generated for this process only."""
    names: KnownNames | None = field(default_factory=KnownNames)
    """The owners of names. None: names are not checked, as at a rendezvous, which serves many
    runs."""
    learns_names: bool = True
    """Whether an unknown name is assigned to the key that uses it now. A payload stream learns
    no names: the names of a plan's participants are known from earlier calls."""
    access: Access = field(default_factory=Access)
    suspensions: Suspensions = field(default_factory=Suspensions)

    def check(self, island: str, key: str, peer_id: str = "") -> None:
        """Raise RefusedError unless the holder of `key`, which has been proved, may take part and
        use the name.

        The error's kind is "banned", "peer" (not in island.allow), "suspended" or "name".
        """
        if text := self.access.ban(island, key, peer_id):
            raise RefusedError("banned", text)
        if not self.access.is_allowed(key, peer_id):
            raise RefusedError("peer", f"{island} is not in island.allow: its key is {key}")
        if seconds := self.suspensions.seconds_left(key):
            text = (
                f"{island} has sent {MAX_MALFORMED} malformed messages, and is refused for "
                f"another {seconds:.0f} s"
            )
            raise RefusedError("suspended", text)
        if self.names is None or (not self.learns_names and self.names.key_of(island) is None):
            return
        if text := self.names.claim(island, key):
            raise RefusedError("name", f"{text}; {NAME_CURE}")

    def blame(self, peer: str, key: str, cause: str) -> bool:
        """Count a malformed message of the key's holder. Return whether it is suspended now."""
        is_suspended = self.suspensions.add(key)
        if is_suspended:
            text = f"suspended after {MAX_MALFORMED} malformed messages: {cause}"
            self.rejections.add(peer, "suspended", text)
        return is_suspended


def load_run_key(path: str | None) -> RunKey | None:
    """Load the key that a config's `run_key_file` names, or None if it names none. Raises
    InputError.
    """
    return None if path is None else read_run_key(Path(path))


def seal(key: RunKey | None, purpose: str, body: bytes) -> bytes:
    """Prefix `body` with a proof that a holder of the key wrote it for this purpose. Without a key,
    return it as is.
    """
    return body if key is None else _seal_line(key, purpose, body) + body


def unseal(key: RunKey | None, purpose: str, raw: bytes) -> bytes:
    """Check the seal and return the body. Raises MessageError if the key or purpose differs, or
    the body was altered.
    """
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


def strip_seal(raw: bytes) -> bytes:
    """Return the body behind a seal without checking the seal. Bytes without a seal are returned
    unchanged.
    """
    return raw[SEAL_BYTES:] if raw.startswith(SEAL_MAGIC) else raw


class FrameMacs:
    """MACs of the frames of one direction. They detect frames that were altered, dropped,
    repeated or reordered.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def begin(self) -> hashlib.blake2b:
        """Begin the next frame's MAC. Update it with the header and the payload; its digest has
        MAC_BYTES bytes.
        """
        mac = hashlib.blake2b(
            self._number.to_bytes(8), key=self._key, digest_size=MAC_BYTES, person=b"diloco frame"
        )
        self._number += 1
        return mac


def _seal_line(key: RunKey, purpose: str, body: bytes) -> bytes:
    proof = hashlib.blake2b(body, key=key.derive("seal", purpose.encode()), digest_size=PROOF_BYTES)
    return SEAL_MAGIC + proof.hexdigest().encode() + b"\n"
