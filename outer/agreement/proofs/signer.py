"""Signing and checking for the round protocol, which itself does not handle keys or files."""

from collections import OrderedDict
from typing import Protocol

from outer.identity.access import Access
from outer.identity.island_key import IslandKey, verify
from outer.identity.known_names import KnownNames
from outer.network.messages import do_shared

MAX_REMEMBERED = 8192
"""The number of valid signatures to remember: a vote is checked on arrival and again as part of
a certificate."""


class Signer(Protocol):
    """Interface that signs for this island and knows the keys of others. tests/outer/signers.py
    has one without cryptography.
    """

    @property
    def public(self) -> str:
        """This island's public key: 64 hexadecimal digits."""
        ...

    def sign(self, text: bytes) -> str:
        """Return this island's signature of the text: 128 hexadecimal digits."""
        ...

    def verify(self, key: str, text: bytes, signature: str) -> bool:
        """Return whether the holder of the public key has signed the text. Never raises."""
        ...

    def key_of(self, island: str) -> str | None:
        """Return the key that the island has proved on a connection, or None if it is not known."""
        ...

    def trusts(self, island: str, key: str) -> bool | None:
        """Return whether the operator's settings let this key count; None if they do not decide."""
        ...


class IslandSigner:
    """Implements `Signer` with the island's Ed25519 key. Lives on one event loop."""

    def __init__(
        self, key: IslandKey, names: KnownNames, run_id: str, access: Access | None = None
    ) -> None:
        """Create a signer. `run_id` is part of every signed text, so signatures from another run
        prove nothing.
        """
        self.public = key.public
        self._key = key
        self._names = names
        self._access = access or Access()
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
                (self._purpose, *entry),
                lambda: verify(key, self._purpose, text, bytes.fromhex(signature)),
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
        # The list of allowed libp2p peer ids does not tell which keys belong to them.
        return key in access.allow if access.allow and not access.peer_ids else None
