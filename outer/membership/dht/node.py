"""Opens a node of hivemind's DHT and connects it to its peers."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hivemind.dht import DHTNode
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils.timed_storage import get_dht_time

from outer.errors import InputError, UnreachableError, first_line
from outer.membership.dht.clocks import require_equal_clocks
from outer.membership.dht.owned_records import MAX_AHEAD_SECONDS, OwnedRecords
from outer.network.retry import retry
from outer.transports.hivemind_addresses import PeerAddress, parse_address, unreachable_message
from outer.transports.hivemind_daemon import Daemon

RPC_SECONDS = 2.0
RETRY_SECONDS = 0.2
MAX_VALUE_BYTES = 1 << 17
"""Limit for a value in the DHT. It fits the longest config, or the record of an island of about
500 ranks, with its seal."""
MAX_SUBKEY_LENGTH = 512
MAX_KEY_BYTES = 1 << 21
"""Limit for all values under a key. An island reads all records of its run each second,
including strangers' records."""
MAX_ENTRIES = 1 << 14
MAX_STORED_BYTES = 1 << 24
"""Limits for the entries that this node stores for others. Beyond them it stores nothing new;
existing entries can be renewed.

A node sends its stored entries to every node that it meets, and needs many times their memory to do
so.
"""
RECOUNT_SECONDS = 1.0
"""Expired entries make room after this time. Counting at each store would let a stranger block
the event loop."""


async def open_dht(
    daemon: Daemon,
    bootstrap: Sequence[str],
    connect_seconds: float = RPC_SECONDS,
    *,
    only_asks: bool = False,
) -> DHTNode:
    """Open a DHT node and connect it to a peer at `bootstrap`.

    Raises InputError if none answers in time, or if the clocks of all peers that answer differ too
    much from this machine's. A node that `only_asks` stores nothing for others, which do not have
    to reach it.
    """
    try:
        owned = OwnedRecords(daemon.auth.island)
        dht = await DHTNode.create(
            p2p=daemon.p2p,
            wait_timeout=RPC_SECONDS,
            strict=False,
            record_validator=owned,
            client_mode=only_asks,
        )
    except (P2PDaemonError, RuntimeError) as error:
        raise InputError(f"the DHT cannot be opened: {first_line(error)}") from None
    dht.protocol.storage = BoundedStorage()
    dht.protocol.cache = BoundedStorage()
    addresses = bootstrap_addresses(bootstrap).values()

    async def meet_any() -> bool:
        return not addresses or any(
            await asyncio.gather(*(meet(dht, daemon, address) for address in addresses))
        )

    if not await retry(meet_any, seconds=connect_seconds, pause_seconds=RETRY_SECONDS):
        await close_dht(dht)
        raise UnreachableError(
            unreachable_message(bootstrap, connect_seconds, "no peer of the DHT answers there")
        )
    try:
        await require_equal_clocks(
            dht, [PeerID.from_base58(address.peer_id) for address in addresses]
        )
    except InputError:
        await close_dht(dht)
        raise
    with suppress(TimeoutError):
        async with asyncio.timeout(RPC_SECONDS):
            await dht.find_nearest_nodes([dht.node_id])  # fills the routing table
    return dht


class BoundedStorage(DHTLocalStorage):
    """The entries that a DHT node stores for others, with limits. hivemind's own storage accepts
    all entries from all nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[tuple[Any, str | None], int] = {}  # bytes by key and subkey
        self._key_bytes: Counter[Any] = Counter()
        self._num_bytes = 0
        self._counted_at = 0.0

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        # A dictionary comes from `store_subkey`, which has checked the newest entry of the
        # dictionary.
        if isinstance(value, bytes) and not self._has_room(key, None, value, expiration_time):
            return False
        return super().store(key, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        is_short = isinstance(subkey, str) and len(subkey) <= MAX_SUBKEY_LENGTH
        if not is_short or not self._has_room(key, subkey, value, expiration_time):
            return False
        return super().store_subkey(key, subkey, value, expiration_time)

    def _has_room(self, key: Any, subkey: str | None, value: bytes, expiration_time: float) -> bool:
        """Return whether an entry may be stored. If so, it is counted, even if a newer one is
        stored already.
        """
        now = get_dht_time()
        if len(value) > MAX_VALUE_BYTES or expiration_time > now + MAX_AHEAD_SECONDS:
            return False
        if now - self._counted_at > RECOUNT_SECONDS:
            self._count(now)
        size = self._sizes.get((key, subkey))
        more = len(value) - (size or 0)
        of_key = self._key_bytes[key] + more
        total = self._num_bytes + more
        if (
            of_key > MAX_KEY_BYTES
            or total > MAX_STORED_BYTES
            or (size is None and len(self._sizes) >= MAX_ENTRIES)
        ):
            return False
        self._sizes[key, subkey] = len(value)
        self._key_bytes[key] = of_key
        self._num_bytes = total
        return True

    def _count(self, now: float) -> None:
        """Count the entries that have not expired."""
        self._sizes = {}
        for key, item in self.items():
            value: Any = item.value
            if isinstance(value, DictionaryDHTValue):
                self._sizes |= {(key, subkey): len(entry.value) for subkey, entry in value.items()}
            else:
                self._sizes[key, None] = len(value)
        self._key_bytes = Counter()
        self._counted_at = now
        for (key, _), size in self._sizes.items():
            self._key_bytes[key] += size
        self._num_bytes = self._key_bytes.total()


def bootstrap_addresses(bootstrap: Sequence[str]) -> dict[str, PeerAddress]:
    """Return peer addresses by bootstrap multiaddress."""
    return {
        maddr: parse_address(f"{maddr.rpartition('/p2p/')[2]}:0@{maddr}") for maddr in bootstrap
    }


async def meet(dht: DHTNode, daemon: Daemon, address: PeerAddress) -> bool:
    """Ping the DHT node at `address`, and return whether it answers. If so, each node is in the
    other's routing table.
    """
    peer_id = PeerID.from_base58(address.peer_id)
    with suppress(TimeoutError, P2PDaemonError, OSError, EOFError):
        async with asyncio.timeout(RPC_SECONDS):
            await daemon.dial(address)
            return await dht.protocol.call_ping(peer_id, validate=True, strict=False) is not None
    return False


async def close_dht(dht: DHTNode) -> None:
    """Leave the DHT. The wait is limited, because the daemon may have died."""
    with suppress(TimeoutError, P2PDaemonError, OSError, EOFError):
        async with asyncio.timeout(RPC_SECONDS):
            await dht.shutdown()
