"""The connections of one rank: transport, messenger and, on rank 0, membership, all of one kind."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outer.errors import InputError
from outer.keys import RunKey, Trust
from outer.membership.base import Membership, Messenger
from outer.membership.records import RunInfo
from outer.refusals import Refusals
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
    """Addresses of the swarm, any of which may be dead; hivemind: none begins a swarm of its own."""
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
    goes by its own clock, drops it after a third of it."""
    run_key: RunKey | None = None
    """What every message is proved with; None: whoever knows the address may take part."""
    allow: Sequence[str] = ()
    """hivemind: the peer ids that may connect; none: all."""
    relay: Literal["off", "client", "server"] = "off"
    """hivemind: reached through relays, or relays for others."""

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
    refusals: Refusals = field(default_factory=Refusals)
    """What peers sent and this rank refused."""
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
    if kind != "hivemind" and (settings.allow or settings.relay != "off"):
        raise InputError(
            "island.allow, island.relay: these are about libp2p peers, "
            f"and outer.transport is {kind!r}; use hivemind, or leave them out"
        )
    return await OPENERS[kind](settings, Trust(settings.run_key, Refusals(), frozenset(settings.allow)))


async def visit(address: str, connect_seconds: float, run_key: RunKey | None = None) -> dict[str, RunInfo]:
    """The runs that are known at a bootstrap address and that `run_key` opens, by id.

    Raises InputError when it cannot be reached, or when the runs there have another key.
    """
    if address.startswith("tcp://"):
        from outer.membership.tcp import visit_rendezvous

        return await visit_rendezvous(address, connect_seconds, run_key)
    if address.startswith("/"):
        from outer.membership.hivemind import visit_swarm

        return await visit_swarm(address, connect_seconds, run_key)
    raise InputError(
        f"got the address {address!r}; allowed: /ip4/HOST/tcp/PORT/p2p/PEER_ID or tcp://HOST:PORT, "
        "as `diloco bootstrap` prints it"
    )


async def _open_loopback(settings: NetworkSettings, trust: Trust) -> Network:
    from outer.membership.loopback import LoopbackMembership, LoopbackMessenger
    from outer.transports.loopback import LoopbackTransport

    hub = settings.hub
    if hub is None:
        raise InputError(
            "outer.transport: loopback connects islands that are threads of one process; "
            "islands in processes of their own need gloo or hivemind"
        )
    transport = LoopbackTransport(hub, settings.run_id, settings.me, settings.connect_seconds)
    messenger = LoopbackMessenger(hub, settings.run_id, settings.me, transport.traffic)
    membership = LoopbackMembership(hub, settings.run_id, settings.island) if settings.is_leader else None
    return Network("loopback", transport, messenger, membership, refusals=trust.refusals)


async def _open_gloo(settings: NetworkSettings, trust: Trust) -> Network:
    from outer.membership.calls import StreamMessenger
    from outer.membership.tcp import dial, listen, open_membership, parse_rendezvous
    from outer.transports.gloo import GlooTransport
    from outer.transports.sealed import SealedTransport

    if not settings.bootstrap:
        raise InputError(
            "island.bootstrap: got no address; outer.transport gloo needs tcp://HOST:PORT, as "
            "`diloco bootstrap --rendezvous tcp` prints it. With several of them none is needed for the run to go on"
        )
    for address in settings.bootstrap:
        parse_rendezvous(address)
    host = settings.listen_host
    transport = GlooTransport(settings.run_id, settings.me, host, settings.announce_host, settings.connect_seconds)
    port = settings.listen_port + settings.rank if settings.listen_port else 0
    messenger = StreamMessenger(settings.run_id, settings.me, dial, transport.traffic, trust)
    try:
        listening = await listen(messenger, host, port, settings.announce_host)
    except OSError as error:
        raise InputError(
            f"island.listen_host, island.listen_port: cannot listen on {host}:{port}: {error.strerror}; "
            "choose an address of this machine and a free port (0: any)"
        ) from None
    if trust.key is not None:
        transport = SealedTransport(transport, trust, settings.run_id, settings.me)
    if not settings.is_leader:
        return Network("gloo", transport, listening, None, refusals=trust.refusals)
    record_seconds = settings.record_seconds / 3
    membership = await open_membership(
        settings.bootstrap, settings.run_id, settings.me, record_seconds, settings.connect_seconds, trust
    )
    return Network("gloo", transport, listening, membership, refusals=trust.refusals, _closers=[membership.close])


async def _open_hivemind(settings: NetworkSettings, trust: Trust) -> Network:
    from outer.membership.dht import open_dht
    from outer.membership.hivemind import HivemindMembership, open_messenger
    from outer.transports.hivemind import HivemindTransport
    from outer.transports.hivemind_daemon import DaemonSettings, attach_daemon, start_daemon

    if settings.is_leader:
        listen, announce = _maddrs(settings)
        own = (settings.identity_path, settings.connect_seconds, settings.relay, trust)
        daemon = await start_daemon(DaemonSettings(listen, announce, list(settings.bootstrap), *own))
    else:
        assert settings.leader_address is not None, "ranks above 0 need rank 0's leader_address"
        daemon = await attach_daemon(settings.leader_address, settings.rank, trust)
    try:
        transport = HivemindTransport(daemon, settings.run_id, settings.me, settings.connect_seconds, trust)
        await transport.open()
        messenger = await open_messenger(daemon, settings.run_id, settings.me, transport.traffic, trust)
        if not settings.is_leader:
            return Network("hivemind", transport, messenger, None, refusals=trust.refusals, _closers=[daemon.close])
        dht = await open_dht(daemon, settings.bootstrap, settings.connect_seconds)
        membership = HivemindMembership(
            dht, daemon, settings.run_id, settings.record_seconds, bootstrap=settings.bootstrap, key=trust.key
        )
    except BaseException:
        await daemon.close()
        raise
    closers: list[Close] = [membership.close, daemon.close]
    return Network("hivemind", transport, messenger, membership, daemon.leader_address, trust.refusals, closers)


def _maddrs(settings: NetworkSettings) -> tuple[list[str], list[str] | None]:
    """The multiaddresses to listen on, and those to announce when they differ."""
    from outer.transports.hivemind_addresses import maddr_of

    listen = [maddr_of(settings.listen_host, settings.listen_port)]
    if settings.announce_host is None:
        return listen, None
    if settings.listen_port == 0:
        raise InputError("island.announce_host needs a fixed island.listen_port: got 0; set the port that is forwarded")
    return listen, [maddr_of(settings.announce_host, settings.listen_port)]


OPENERS: dict[str, Callable[[NetworkSettings, Trust], Awaitable[Network]]] = {
    "loopback": _open_loopback,
    "gloo": _open_gloo,
    "hivemind": _open_hivemind,
}
