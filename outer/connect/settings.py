"""The settings for opening a rank's connections to other islands, and the connections
themselves.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outer.agreement.proofs.signer import IslandSigner
from outer.identity.island_key import IslandKey
from outer.identity.known_names import KnownNames
from outer.membership.base import Membership
from outer.network.endpoints import Endpoint, Messenger
from outer.network.rejections import Rejections
from outer.network.run_key import RunKey
from outer.transports.base import Transport
from outer.transports.loopback import Hub


@dataclass(frozen=True)
class NetworkSettings:
    """Identity of this rank, its addresses, and the addresses of the swarm."""

    run_id: str
    island: str
    rank: int
    bootstrap: Sequence[str] = ()
    """Addresses of the swarm, some of which may not answer. With hivemind, an island without
    addresses starts a swarm."""
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    announce_host: str | None = None
    """Host at which others reach this machine, if it differs from listen_host."""
    island_key: IslandKey | None = None
    """The island's key. Without one, the network creates a temporary key."""
    names_path: Path | None = None
    """File that keeps the owners of the run's names. Only on rank 0."""
    ban_files: Sequence[Path] = ()
    """Files of banned islands (outer/identity/access.py)."""
    identity_path: Path | None = None
    """With hivemind, the file of the libp2p daemon's own key, if this rank starts a daemon."""
    hub: Hub | None = None
    """With loopback, the network that the islands of this process share."""
    daemon_address: str | None = None
    """With hivemind, `Network.daemon_address` of the rank of this node that has started the
    node's libp2p daemon. None on that rank, and therefore on rank 0."""
    connect_seconds: float = 30.0
    """Longest wait for the swarm, and for the other endpoints of a group."""
    record_seconds: float = 15.0
    """Time after which the DHT drops a dead island's record. The islands' clocks must agree to well
    within it. A rendezvous uses its own clock and drops the record after a third of this time.
    """
    run_key: RunKey | None = None
    """Key that authenticates every message. Without one, anyone who knows the address may take
    part."""
    allow: Sequence[str] = ()
    """Public keys of the islands that may take part; with hivemind also libp2p peer ids. If it
    is empty, all are allowed."""
    relay: Literal["off", "client", "server"] = "off"
    """With hivemind: "client" is reached through relays, "server" relays for others."""
    tls_streams: int = 1
    """With tls, number of connections on which this rank sends to each rank of another island."""
    relays: Sequence[str] = ()
    """With tls, relays as host:port, through which others reach this rank."""
    dht_port: int = 0
    """With tls and bootstrap addresses of a DHT, the port on which rank 0's DHT node listens. 0:
    any free port, unless others reach this machine at announce_host; in that case the node only
    sends requests."""
    proxy: str | None = None
    """With tls, the URL of the proxy through which this rank makes all its connections."""
    gloo_in_public: bool = False
    """With gloo, listen on an address of the open internet although gloo does not authenticate
    connections."""

    @property
    def me(self) -> Endpoint:
        return Endpoint(self.island, self.rank)


@dataclass
class Network:
    """The connections of one rank to other islands. They live on one event loop."""

    transport: Transport
    messenger: Messenger
    rejections: Rejections
    names: KnownNames
    island_key: IslandKey
    membership: Membership | None = None  # on rank 0 only
    daemon_address: str | None = None
    """With hivemind, address of this rank's libp2p daemon, to which the other ranks of its node
    attach.
    """
    _closers: Sequence[Callable[[], Awaitable[None]]] = ()
    wait_for_loss: Callable[[], Awaitable[str]] | None = None
    """Function that waits until these connections are lost for good, so that the island needs a
    new process. It returns the cause, or "" if they were closed. None where connections cannot
    be lost for good."""
    signer: IslandSigner = field(init=False)
    """Signs this island's votes and checks the votes of others. `open_network` sets it."""

    async def close(self) -> None:
        """Leave the swarm and free sockets, processes and files. Idempotent."""
        async with (
            AsyncExitStack() as steps
        ):  # runs all steps in reverse order, even if some of them raise
            closers = self._closers
            self._closers = ()
            for close in reversed(closers):
                steps.push_async_callback(close)
            steps.push_async_callback(self.transport.close)
            steps.push_async_callback(self.messenger.close)
            if self.membership is not None:
                steps.push_async_callback(self.membership.leave)
            self.names.save()
