"""Signatures of the values in hivemind's DHT. Every DHT node of a run, and every bootstrap peer,
checks them.

A value belongs to the island key in its subkey, `<name>@<public key>`, and is followed by that
key's signature over its place, its content and its expiration time. So no other island can replace,
prolong or remove the value, and as the DHT keeps the value that expires last, an old value never
replaces a newer one. Values without an owner are not stored.
"""

import re
import struct

from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from outer.identity.island_key import PUBLIC_KEY, SIGNATURE_BYTES, IslandKey, verify
from outer.network.endpoints import ISLAND_NAME

MAX_AHEAD_SECONDS = 300.0
"""A value may expire at most this long from now, so that its memory becomes free again. Records
and configs live for a minute."""
PURPOSE = "value in the DHT"
_SUBKEY = re.compile(f"({ISLAND_NAME})@({PUBLIC_KEY})")


class OwnedRecords(RecordValidatorBase):
    """Signs this node's own values, and refuses other nodes' values that their owners have not
    signed.
    """

    def __init__(self, key: IslandKey) -> None:
        self._key = key

    def validate(self, record: DHTRecord) -> bool:
        found = _parse_bytes(record.subkey)
        if found is None or record.expiration_time > get_dht_time() + MAX_AHEAD_SECONDS:
            return False
        value = record.value[:-SIGNATURE_BYTES]
        signature = record.value[-SIGNATURE_BYTES:]
        return verify(found[1], PURPOSE, _signed_bytes(record, value), signature)

    def sign_value(self, record: DHTRecord) -> bytes:
        return record.value + self._key.sign(PURPOSE, _signed_bytes(record, record.value))

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value[:-SIGNATURE_BYTES]


def make_subkey(name: str, key: IslandKey) -> str:
    """Return the subkey of this island's own value under a name."""
    return f"{name}@{key.public}"


def parse_subkey(subkey: object) -> tuple[str, str] | None:
    """Return the name and the owner's public key in a subkey, or None if it does not have this
    form.
    """
    found = _SUBKEY.fullmatch(subkey) if isinstance(subkey, str) else None
    return (found[1], found[2]) if found else None


def _parse_bytes(subkey: bytes) -> tuple[str, str] | None:
    try:
        return parse_subkey(MSGPackSerializer.loads(subkey))
    except Exception:  # noqa: BLE001 - bytes from a peer; the parser raises errors of many types
        return None


def _signed_bytes(record: DHTRecord, value: bytes) -> bytes:
    lengths = struct.pack("!QQd", len(record.key), len(record.subkey), record.expiration_time)
    return lengths + record.key + record.subkey + value
