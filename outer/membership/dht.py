"""A node of hivemind's DHT, and how it meets its peers."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from hivemind.dht import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID

from outer.errors import InputError
from outer.transports.hivemind_addresses import PeerAddress, parse_address, unreachable
from outer.transports.hivemind_daemon import Daemon

RPC_SECONDS = 2.0
RETRY_SECONDS = 0.2


async def open_dht(daemon: Daemon, bootstrap: Sequence[str], connect_seconds: float = RPC_SECONDS) -> DHTNode:
    """A DHT node on the daemon, known to a peer at `bootstrap`, which may be starting. Raises InputError."""
    try:
        dht = await DHTNode.create(p2p=daemon.p2p, wait_timeout=RPC_SECONDS, strict=False)
    except (P2PDaemonError, RuntimeError) as error:
        raise InputError(f"the DHT cannot be opened: {str(error).splitlines()[0]}") from None
    addresses, deadline = bootstrap_addresses(bootstrap).values(), time.monotonic() + connect_seconds
    while addresses and not any(await asyncio.gather(*(meet(dht, daemon, address) for address in addresses))):
        if time.monotonic() > deadline:
            await close_dht(dht)
            raise InputError(unreachable(bootstrap, connect_seconds, "no peer of the DHT answers there"))
        await asyncio.sleep(RETRY_SECONDS)
    with suppress(TimeoutError):
        async with asyncio.timeout(RPC_SECONDS):
            await dht.find_nearest_nodes([dht.node_id])  # which fills the table
    return dht


def bootstrap_addresses(bootstrap: Sequence[str]) -> dict[str, PeerAddress]:
    """Multiaddresses as peers' addresses."""
    return {maddr: parse_address(f"{maddr.rpartition('/p2p/')[2]}:0@{maddr}") for maddr in bootstrap}


async def meet(dht: DHTNode, daemon: Daemon, address: PeerAddress) -> bool:
    """Whether the DHT node there answers; if so, each is in the other's table."""
    peer_id = PeerID.from_base58(address.peer_id)
    with suppress(TimeoutError, P2PDaemonError, OSError, EOFError):
        async with asyncio.timeout(RPC_SECONDS):
            await daemon.dial(address)
            return await dht.protocol.call_ping(peer_id, validate=True, strict=False) is not None
    return False


async def close_dht(dht: DHTNode) -> None:
    """Leave the DHT; a daemon that has died does not hold it up."""
    with suppress(TimeoutError, P2PDaemonError, OSError, EOFError):
        async with asyncio.timeout(RPC_SECONDS):
            await dht.shutdown()
