"""An island's key pair (Ed25519). It proves statements made in the island's name.

Each signature covers its purpose, so a signature for one purpose proves nothing for another. A
purpose begins with the run's name wherever a statement must not be valid in another run.
"""

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pydantic import Field

from outer.errors import InputError
from outer.identity.files import file_beside

log = logging.getLogger(__name__)

KEY_FILE = "island.key"
"""Name of the key's file in the island's folder."""
PUBLIC_KEY = "[0-9a-f]{64}"
SECRET_BYTES = 32
SIGNATURE_BYTES = 64
PublicKey = Annotated[str, Field(max_length=2 * SECRET_BYTES, pattern=f"^{PUBLIC_KEY}$")]
"""Field of a message: a public key in hexadecimal digits."""
Signature = Annotated[
    str, Field(max_length=2 * SIGNATURE_BYTES, pattern=f"^[0-9a-f]{{{2 * SIGNATURE_BYTES}}}$")
]
"""Field of a message: a signature in hexadecimal digits."""
_PRIME = 2**255 - 19


class IslandKey:
    """The secret half of an island's key. `public` is the other half in hexadecimal digits,
    which is the island's identity.
    """

    def __init__(self, secret: bytes) -> None:
        """Create the key from `secret`, 32 random bytes."""
        self._private = Ed25519PrivateKey.from_private_bytes(secret)
        self.secret = secret
        """The secret bytes, which only the island's own ranks may have."""
        self.public = self._private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> "IslandKey":
        return cls(os.urandom(SECRET_BYTES))

    def sign(self, purpose: str, body: bytes) -> bytes:
        """Return the signature of `body` for this purpose, SIGNATURE_BYTES long. Equal arguments
        give equal signatures.
        """
        return self._private.sign(_signed_bytes(purpose, body))

    def pair_secret(self, public: str) -> bytes:
        """Return 32 bytes that only this island and the holder of the key `public` can compute.
        Raises ValueError.

        They are the result of a Diffie-Hellman exchange of the two island keys on Curve25519, which
        needs no message.
        """
        clamped = hashlib.sha512(self.secret).digest()[
            :32
        ]  # RFC 8032: the secret scalar of an Ed25519 key
        private = X25519PrivateKey.from_private_bytes(clamped)
        return private.exchange(
            X25519PublicKey.from_public_bytes(_to_x25519(bytes.fromhex(public)))
        )


def verify(public: str, purpose: str, body: bytes, signature: bytes) -> bool:
    """Return whether the holder of the key `public` (64 hexadecimal digits) signed `body` for
    this purpose. Never raises.
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(signature, _signed_bytes(purpose, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def load_island_key(path: Path) -> IslandKey:
    """Read the island's key, or create it if there is no file. The file is readable by this user
    only. Raises InputError.
    """
    try:
        if not path.exists():
            _create(path)
        if path.stat().st_mode & 0o077:
            log.warning(
                "other users of this machine can read the island's key; run `chmod 600 %s`", path
            )
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InputError(
            f"the island's key {str(path)!r} cannot be used: {error.strerror}; check its folder"
        ) from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(
            f"the island's key {str(path)!r} is no Ed25519 key in PEM form; restore it from a "
            "copy, or remove it and "
            "choose another island.name, because the old name belongs to the old key"
        )
    return IslandKey(key.private_bytes_raw())


def _create(path: Path) -> None:
    """Create the file in one step, complete and readable by this user only. Another process may
    create it first.
    """
    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with file_beside(path) as beside:
        with open(os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(beside, path)


def _signed_bytes(purpose: str, body: bytes) -> bytes:
    name = purpose.encode()
    return b"diloco island key 1\0" + len(name).to_bytes(4) + name + body


def _to_x25519(ed25519: bytes) -> bytes:
    """Return the same point of the curve in X25519's form: u = (1 + y) / (1 - y). Raises
    ValueError for the point 1.
    """
    y = int.from_bytes(ed25519, "little") & ((1 << 255) - 1)
    return ((1 + y) * pow(1 - y, -1, _PRIME) % _PRIME).to_bytes(32, "little")
