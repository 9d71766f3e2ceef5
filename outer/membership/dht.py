"""Opens a node of hivemind's DHT and connects it to its peers."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from hivemind.dht import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID

from outer.errors import InputError, first_line
from outer.membership.owned_records import OwnedRecords
from outer.network.retry import retry
from outer.transports.hivemind_addresses import PeerAddress, parse_address, unreachable_message
from outer.transports.hivemind_daemon import Daemon

RPC_SECONDS = 2.0
RETRY_SECONDS = 0.2


async def open_dht(daemon: Daemon, bootstrap: Sequence[str], connect_seconds: float = RPC_SECONDS) -> DHTNode:
    """Open a DHT node and connect it to a peer at `bootstrap`. Raises InputError if none answers in time."""
    try:
        owned = OwnedRecords(daemon.auth.island)
        dht = await DHTNode.create(p2p=daemon.p2p, wait_timeout=RPC_SECONDS, strict=False, record_validator=owned)
    except (P2PDaemonError, RuntimeError) as error:
        raise InputError(f"the DHT cannot be opened: {first_line(error)}") from None
    addresses = bootstrap_addresses(bootstrap).values()

    async def meet_any() -> bool:
        return not addresses or any(await asyncio.gather(*(meet(dht, daemon, address) for address in addresses)))

    if not await retry(meet_any, seconds=connect_seconds, pause_seconds=RETRY_SECONDS):
        await close_dht(dht)
        raise InputError(unreachable_message(bootstrap, connect_seconds, "no peer of the DHT answers there"))
    with suppress(TimeoutError):
        async with asyncio.timeout(RPC_SECONDS):
            await dht.find_nearest_nodes([dht.node_id])  # fills the routing table
    return dht


def bootstrap_addresses(bootstrap: Sequence[str]) -> dict[str, PeerAddress]:
    """Peer addresses by bootstrap multiaddress."""
    return {maddr: parse_address(f"{maddr.rpartition('/p2p/')[2]}:0@{maddr}") for maddr in bootstrap}


async def meet(dht: DHTNode, daemon: Daemon, address: PeerAddress) -> bool:
    """Ping the DHT node at `address`, and return whether it answers. Then each node is in the other's routing table."""
    peer_id = PeerID.from_base58(address.peer_id)
    with suppress(TimeoutError, P2PDaemonError, OSError, EOFError):
        async with asyncio.timeout(RPC_SECONDS):
            await daemon.dial(address)
            return await dht.protocol.call_ping(peer_id, validate=True, strict=False) is not None
    return False


async def close_dht(dht: DHTNode) -> None:
    """Leave the DHT. The wait is bounded, because the daemon may have died."""
    with suppress(TimeoutError, P2PDaemonError, OSError, EOFError):
        async with asyncio.timeout(RPC_SECONDS):
            await dht.shutdown()
