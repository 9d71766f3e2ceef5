"""The connections of one rank: transport, messenger and, on rank 0, membership, all of one kind."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from outer.errors import InputError
from outer.membership.base import Membership, Messenger
from outer.membership.records import RunInfo
from outer.transports.base import Endpoint, Transport
from outer.transports.loopback import Hub

Close = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class NetworkSettings:
    """Who this rank is, and where the others are."""

    run_id: str
    island: str
    rank: int
    bootstrap: Sequence[str] = ()
    """Addresses of the swarm; hivemind: none begins a swarm of its own."""
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    announce_host: str | None = None
    """Where others reach this machine, when it is not listen_host."""
    identity_path: Path | None = None
    hub: Hub | None = None
    """loopback: what the islands of this process share."""
    leader_address: str | None = None
    """On ranks above 0: rank 0's `Network.leader_address`."""
    connect_seconds: float = 30.0
    """Longest wait for the swarm, and for the others of a group."""
    record_seconds: float = 15.0
    """How long a dead island's record lives in the DHT; clocks must agree to well within it. A rendezvous, which
    counts heartbeats, finds out in a third of it."""

    @property
    def me(self) -> Endpoint:
        return Endpoint(self.island, self.rank)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


@dataclass
class Network:
    """What a rank speaks to other islands with; lives on one event loop."""

    kind: str
    transport: Transport
    messenger: Messenger
    membership: Membership | None
    """None on ranks above 0."""
    leader_address: str | None = None
    """What the other ranks of this island need in order to open theirs."""
    _closers: list[Close] = field(default_factory=list)

    async def close(self) -> None:
        """Leave the swarm and free sockets, processes and files. Idempotent."""
        async with AsyncExitStack() as steps:  # in reverse, and each of them whatever the others raise
            closers, self._closers = self._closers, []
            for close in reversed(closers):
                steps.push_async_callback(close)
            steps.push_async_callback(self.transport.close)
            steps.push_async_callback(self.messenger.close)
            if self.membership is not None:
                steps.push_async_callback(self.membership.leave)


async def open_network(kind: str, settings: NetworkSettings) -> Network:
    """This rank's network, on the running event loop; rank 0 first. Raises InputError when it cannot be had."""
    if kind not in OPENERS:
        raise InputError(f"outer.transport: got {kind!r}; allowed: {', '.join(OPENERS)}")
    return await OPENERS[kind](settings)


async def visit(address: str, connect_seconds: float) -> dict[str, RunInfo]:
    """The runs that are known at a bootstrap address, by id. Raises InputError when it cannot be reached."""
    if address.startswith("tcp://"):
        from outer.membership.tcp import visit_rendezvous

        return await visit_rendezvous(address, connect_seconds)
    if address.startswith("/"):
        from outer.membership.hivemind import visit_swarm

        return await visit_swarm(address, connect_seconds)
    raise InputError(
        f"got the address {address!r}; allowed: /ip4/HOST/tcp/PORT/p2p/PEER_ID or tcp://HOST:PORT, "
        "as `diloco bootstrap` prints it"
    )


async def _open_loopback(settings: NetworkSettings) -> Network:
    from outer.membership.loopback import LoopbackMembership, LoopbackMessenger
    from outer.transports.loopback import LoopbackTransport

    hub = settings.hub
    if hub is None:
        raise InputError(
            "outer.transport: loopback connects islands that are threads of one process; "
            "islands in processes of their own need gloo or hivemind"
        )
    transport = LoopbackTransport(hub, settings.run_id, settings.me, settings.connect_seconds)
    messenger = LoopbackMessenger(hub, settings.run_id, settings.me)
    membership = LoopbackMembership(hub, settings.run_id, settings.island) if settings.is_leader else None
    return Network("loopback", transport, messenger, membership)


async def _open_gloo(settings: NetworkSettings) -> Network:
    from outer.membership.tcp import TcpMembership, connect_store, open_messenger, parse_rendezvous
    from outer.transports.gloo import GlooTransport

    if len(settings.bootstrap) != 1:
        raise InputError(
            f"island.bootstrap: got {len(settings.bootstrap)} addresses; outer.transport gloo needs one, "
            "tcp://HOST:PORT, as `diloco bootstrap --rendezvous tcp` prints it"
        )
    address = settings.bootstrap[0]
    transport = GlooTransport(
        parse_rendezvous(address), settings.run_id, settings.me, settings.listen_host, settings.connect_seconds
    )
    store = await connect_store(address, settings.connect_seconds)
    port = settings.listen_port + settings.rank if settings.listen_port else 0
    messenger = await open_messenger(
        settings.run_id, settings.me, (settings.listen_host, port), settings.announce_host, transport.traffic
    )
    if not settings.is_leader:
        return Network("gloo", transport, messenger, None)
    membership = TcpMembership(store, settings.run_id, settings.record_seconds / 3)
    return Network("gloo", transport, messenger, membership, _closers=[membership.close])


async def _open_hivemind(settings: NetworkSettings) -> Network:
    from outer.membership.hivemind import HivemindMembership, open_dht, open_messenger
    from outer.transports.base import Traffic
    from outer.transports.hivemind import HivemindTransport
    from outer.transports.hivemind_daemon import attach_daemon, start_daemon

    if settings.is_leader:
        daemon = await start_daemon(
            *_maddrs(settings), list(settings.bootstrap), settings.identity_path, settings.connect_seconds
        )
    else:
        assert settings.leader_address is not None, "ranks above 0 need rank 0's leader_address"
        daemon = await attach_daemon(settings.leader_address, settings.rank)
    try:
        traffic = Traffic()
        transport = HivemindTransport(daemon, settings.run_id, settings.me, traffic, settings.connect_seconds)
        await transport.open()
        messenger = await open_messenger(daemon, settings.run_id, settings.me, traffic)
        if not settings.is_leader:
            return Network("hivemind", transport, messenger, None, _closers=[daemon.close])
        dht = await open_dht(daemon, list(settings.bootstrap))
        membership = HivemindMembership(dht, settings.run_id, settings.record_seconds)
    except BaseException:
        await daemon.close()
        raise
    closers: list[Close] = [membership.close, daemon.close]
    return Network("hivemind", transport, messenger, membership, daemon.leader_address, closers)


def _maddrs(settings: NetworkSettings) -> tuple[list[str], list[str] | None]:
    """The multiaddresses to listen on, and those to announce when they differ."""
    from outer.transports.hivemind_daemon import maddr_of

    listen = [maddr_of(settings.listen_host, settings.listen_port)]
    if settings.announce_host is None:
        return listen, None
    if settings.listen_port == 0:
        raise InputError("island.announce_host needs a fixed island.listen_port: got 0; set the port that is forwarded")
    return listen, [maddr_of(settings.announce_host, settings.listen_port)]


OPENERS: dict[str, Callable[[NetworkSettings], Awaitable[Network]]] = {
    "loopback": _open_loopback,
    "gloo": _open_gloo,
    "hivemind": _open_hivemind,
}
