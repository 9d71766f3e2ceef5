"""Signing and checking for the round protocol, which itself knows neither keys nor files."""

from collections import OrderedDict
from typing import Protocol

from outer.identity.access import Access
from outer.identity.island_key import IslandKey, verify
from outer.identity.known_names import KnownNames
from outer.network.messages import do_shared

MAX_REMEMBERED = 8192
"""Signatures that are known to be good. A vote is checked when it comes and again in a certificate."""


class Signer(Protocol):
    """Signs for this island, and knows the keys of the others. tests/outer/signers.py has one without cryptography."""

    @property
    def public(self) -> str:
        """This island's public key: 64 hexadecimal digits."""
        ...

    def sign(self, text: bytes) -> str:
        """This island's signature: 128 hexadecimal digits."""
        ...

    def verify(self, key: str, text: bytes, signature: str) -> bool:
        """Whether the holder of the public key has signed the text. Never raises."""
        ...

    def key_of(self, island: str) -> str | None:
        """The key that the island has proved on a connection, or None if it is not known."""
        ...

    def trusts(self, island: str, key: str) -> bool | None:
        """Whether the operator has said that the island's word counts; None if the operator has said nothing."""
        ...


class IslandSigner:
    """Implements `Signer` with the island's Ed25519 key. Lives on one event loop."""

    def __init__(self, key: IslandKey, names: KnownNames, run_id: str, access: Access | None = None) -> None:
        """`run_id` enters every signature, so that what was signed in another run proves nothing."""
        self.public = key.public
        self._key, self._names, self._access = key, names, access or Access()
        self._purpose = f"{run_id}/commit"
        self._good: OrderedDict[tuple[str, bytes, str], None] = OrderedDict()

    def sign(self, text: bytes) -> str:
        return self._key.sign(self._purpose, text).hex()

    def verify(self, key: str, text: bytes, signature: str) -> bool:
        entry = (key, text, signature)
        if entry in self._good:
            return True
        try:
            is_good = do_shared(
                (self._purpose, *entry), lambda: verify(key, self._purpose, text, bytes.fromhex(signature))
            )
        except ValueError:
            return False
        if is_good:
            self._good[entry] = None
            while len(self._good) > MAX_REMEMBERED:
                self._good.popitem(last=False)
        return is_good

    def key_of(self, island: str) -> str | None:
        return self._names.key_of(island)

    def trusts(self, island: str, key: str) -> bool | None:
        access = self._access
        if access.ban(island, key):
            return False
        # A list with libp2p peer ids does not say which keys belong to them.
        return key in access.allow if access.allow and not access.peer_ids else None
