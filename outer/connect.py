"""Opens the connections of one rank: a transport, a messenger and, on rank 0, the membership, all of one kind."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outer.agreement.proofs.signer import IslandSigner
from outer.config import PORTS_OF_TLS
from outer.errors import InputError
from outer.identity.access import Access
from outer.identity.island_key import IslandKey
from outer.identity.known_names import KnownNames
from outer.identity.tls import TlsIdentity
from outer.membership.base import Membership
from outer.membership.records import RunInfo
from outer.membership.rendezvous_link import check_rendezvous_addresses
from outer.membership.tcp import find_runs_at_rendezvous, open_membership
from outer.network.endpoints import Endpoint, Messenger, Traffic
from outer.network.rejections import Rejections
from outer.network.retry import retry_unreachable
from outer.network.rpc import StreamMessenger
from outer.network.run_key import PeerAuth, RunKey
from outer.routes.addresses import Door, find_key, parse_relays
from outer.routes.dialer import Dialer
from outer.routes.proxy import parse_proxy
from outer.routes.registration import Accept, Registrant, Registrations
from outer.routes.streams import find_port, listen, serve_connection
from outer.transports.base import Transport
from outer.transports.loopback import Hub
from outer.transports.tls.addresses import build_address, choose_announced_host


@dataclass(frozen=True)
class NetworkSettings:
    """Identity of this rank, its addresses, and those of the swarm."""

    run_id: str
    island: str
    rank: int
    bootstrap: Sequence[str] = ()
    """Addresses of the swarm, any of which may be dead. With hivemind, an island without addresses starts a swarm."""
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    announce_host: str | None = None
    """Host at which others reach this machine, if it is not listen_host."""
    island_key: IslandKey | None = None
    """The island's key. Without one, the network makes a key that nobody knows afterwards."""
    names_path: Path | None = None
    """File that keeps the owners of the run's names. On rank 0 only."""
    ban_files: Sequence[Path] = ()
    """Files of banned islands (outer/identity/access.py)."""
    identity_path: Path | None = None
    """With hivemind, file of the libp2p daemon's own key."""
    hub: Hub | None = None
    """With loopback, the network that the islands of this process share."""
    leader_address: str | None = None
    """On ranks above 0, rank 0's `Network.leader_address`."""
    connect_seconds: float = 30.0
    """Longest wait for the swarm, and for the other endpoints of a group."""
    record_seconds: float = 15.0
    """Time after which the DHT drops a dead island's record. The islands' clocks must agree to well within it. A
    rendezvous uses its own clock and drops the record after a third of this time."""
    run_key: RunKey | None = None
    """Key that authenticates every message. Without one, anybody who knows the address may take part."""
    allow: Sequence[str] = ()
    """Public keys of the islands that may take part; with hivemind also libp2p peer ids. Empty allows all."""
    relay: Literal["off", "client", "server"] = "off"
    """With hivemind: client is reached through relays, server relays for others."""
    tls_streams: int = 1
    """With tls, connections on which this rank sends to each rank of another island."""
    relays: Sequence[str] = ()
    """With tls, relays as host:port, by which others reach this rank."""
    proxy: str | None = None
    """With tls, the URL of the proxy through which this rank dials whatever it dials."""
    gloo_in_public: bool = False
    """With gloo, listen on an address of the open internet although gloo asks nobody who he is."""

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
    leader_address: str | None = None
    """Address that the other ranks of this island need to open their networks."""
    _closers: Sequence[Callable[[], Awaitable[None]]] = ()
    wait_for_loss: Callable[[], Awaitable[str]] | None = None
    """Waits until these connections are lost for good, so that the island needs a new process, and returns the cause,
    or "" if they were closed. None where that cannot happen."""
    signer: IslandSigner = field(init=False)
    """Signs this island's votes and checks those of others. `open_network` sets it."""

    async def close(self) -> None:
        """Leave the swarm and free sockets, processes and files. Idempotent."""
        async with AsyncExitStack() as steps:  # runs all steps in reverse order, even if some of them raise
            closers, self._closers = self._closers, ()
            for close in reversed(closers):
                steps.push_async_callback(close)
            steps.push_async_callback(self.transport.close)
            steps.push_async_callback(self.messenger.close)
            if self.membership is not None:
                steps.push_async_callback(self.membership.leave)
            self.names.save()


async def open_network(kind: str, settings: NetworkSettings) -> Network:
    """Open this rank's network on the running event loop. Rank 0 opens first. Raises InputError on failure."""
    if kind not in OPENERS:
        raise InputError(f"outer.transport: got {kind!r}; allowed: {', '.join(OPENERS)}")
    auth, names = _build_auth(settings)
    if kind != "hivemind" and settings.relay != "off":
        raise InputError(
            f"island.relay: it is for libp2p peers, and outer.transport is {kind!r}; use hivemind, or leave it out"
        )
    for name in ("relays", "proxy") if kind != "tls" else ():
        if getattr(settings, name):
            raise InputError(f"island.{name}: it is for outer.transport tls, and this is {kind!r}; leave it out")
    if kind != "hivemind" and auth.access.peer_ids:
        raise InputError(
            f"island.allow: {auth.access.peer_ids[0]!r} is not an island's key (64 hexadecimal digits, as `diloco key` "
            f"prints it), and libp2p peer ids are for outer.transport hivemind; it is {kind!r}"
        )
    opened = retry_unreachable(lambda: OPENERS[kind](settings, auth, names), names.knows_others(settings.island))
    network = await opened
    network.signer = IslandSigner(auth.island, names, settings.run_id, auth.access)
    return network


def _build_auth(settings: NetworkSettings) -> tuple[PeerAuth, KnownNames]:
    """How this rank authenticates its peers, and the owners of names. Raises InputError."""
    key, names = settings.island_key or IslandKey.generate(), KnownNames(settings.names_path)
    if problem := names.claim(settings.island, key.public):
        raise InputError(
            f"island.name: {problem}, as {settings.names_path or 'the run'} says; restore the island's old key, or "
            "choose another name"
        )
    access = Access(frozenset(settings.allow), settings.ban_files)
    return PeerAuth(settings.run_key, Rejections(), key, names, access=access), names


async def find_runs(
    address: str, connect_seconds: float, run_key: RunKey | None = None, proxy: str | None = None
) -> dict[str, RunInfo]:
    """The runs at a bootstrap address that `run_key` opens, by id. Raises InputError if unreachable or none opens."""
    if address.startswith("tcp://"):
        return await find_runs_at_rendezvous(address, connect_seconds, run_key, Dialer(parse_proxy(proxy)))
    if address.startswith("/"):
        from outer.membership.hivemind import find_runs_in_swarm

        return await find_runs_in_swarm(address, connect_seconds, run_key)
    raise InputError(
        f"got the address {address!r}; allowed: /ip4/HOST/tcp/PORT/p2p/PEER_ID or tcp://HOST:PORT, "
        "as `diloco bootstrap` prints it"
    )


async def _open_loopback(settings: NetworkSettings, auth: PeerAuth, names: KnownNames) -> Network:
    from outer.membership.loopback import LoopbackMembership, LoopbackMessenger
    from outer.transports.loopback import LoopbackTransport

    hub = settings.hub
    if hub is None:
        raise InputError(
            "outer.transport: loopback connects islands that are threads of one process; "
            "islands in separate processes need gloo, tls or hivemind"
        )
    transport = LoopbackTransport(hub, settings.run_id, settings.me, settings.connect_seconds)
    messenger = LoopbackMessenger(hub, settings.run_id, settings.me, transport.traffic)
    membership = LoopbackMembership(hub, settings.run_id, settings.island) if settings.rank == 0 else None
    hub.introduce(settings.run_id, settings.island, auth.island.public, names)
    return Network(transport, messenger, auth.rejections, names, auth.island, membership)


async def _open_gloo(settings: NetworkSettings, auth: PeerAuth, names: KnownNames) -> Network:
    from outer.transports.gloo.door import check_is_private, check_listen_host
    from outer.transports.gloo.transport import GlooTransport
    from outer.transports.sealed import SealedTransport

    host = settings.listen_host
    check_listen_host(host)
    for name in ("listen_host", "announce_host") if not settings.gloo_in_public else ():
        if (own := getattr(settings, name)) is not None:
            await check_is_private(f"island.{name}", own)
    port = settings.listen_port + settings.rank if settings.listen_port else 0
    messenger = await _open_messenger(settings, "gloo", auth, port, settings.announce_host or host, Dialer())
    transport = GlooTransport(settings.me, messenger, messenger.traffic, host, settings.connect_seconds)
    if auth.key is not None:
        transport = SealedTransport(transport, auth, settings.run_id, settings.me)
    network = Network(transport, messenger, auth.rejections, names, auth.island)
    return await _meet_at_rendezvous(settings, network, auth)


async def _open_tls(settings: NetworkSettings, auth: PeerAuth, names: KnownNames) -> Network:
    from outer.transports.tls.transport import TlsTransport

    host, tls, dialer = settings.listen_host, TlsIdentity(), Dialer(parse_proxy(settings.proxy))
    relays, rank, key = parse_relays(settings.relays), settings.rank, auth.island
    announced = choose_announced_host(host, settings.announce_host, relays)
    port = settings.listen_port + PORTS_OF_TLS * rank if settings.listen_port else 0
    messenger = await _open_messenger(settings, "tls", auth, port, host, dialer)
    messenger.tls, messenger.find_key, messenger.on_failure = tls, find_key, dialer.blame
    messenger.address = build_address(key.public, announced, find_port(messenger), relays, rank, "calls")
    own = (messenger.traffic, settings.connect_seconds, settings.tls_streams, dialer)
    transport = TlsTransport(settings.run_id, settings.me, auth, tls, *own)
    try:
        await transport.open(host, port and port + 1, announced, relays)
    except OSError as error:
        await messenger.close()
        raise _cannot_listen(host, port and port + 1, error) from None
    accept: dict[Door, Accept] = {"calls": lambda one: serve_connection(messenger, one), "payloads": transport.accept}
    registrations = Registrations(relays, Registrant(key, rank, auth.key, dialer, accept))
    network = Network(transport, messenger, auth.rejections, names, key, _closers=[registrations.close])
    if announced is None:
        try:
            await registrations.wait_for_one(settings.connect_seconds)
        except BaseException:
            await network.close()
            raise
    return await _meet_at_rendezvous(settings, network, auth, dialer)


async def _open_messenger(
    settings: NetworkSettings, kind: str, auth: PeerAuth, port: int, announced: str, dialer: Dialer
) -> StreamMessenger:
    """Listen for calls. Raises InputError, also for addresses that are no rendezvous."""
    check_rendezvous_addresses(kind, settings.bootstrap)
    messenger = StreamMessenger(settings.run_id, settings.me, dialer.open_streams, Traffic(), auth)
    try:
        return await listen(messenger, settings.listen_host, port, announced)
    except OSError as error:
        raise _cannot_listen(settings.listen_host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> InputError:
    return InputError(
        f"island.listen_host, island.listen_port: cannot listen on {host}:{port}: {error.strerror}; "
        "choose an address of this machine and a free port (0: any)"
    )


async def _meet_at_rendezvous(
    settings: NetworkSettings, network: Network, auth: PeerAuth, dialer: Dialer | None = None
) -> Network:
    """The network with the membership at the rendezvous, which rank 0 has. It is closed if that fails."""
    if settings.rank > 0:
        return network
    seconds = settings.record_seconds / 3, settings.connect_seconds
    try:
        network.membership = membership = await open_membership(
            settings.bootstrap, settings.run_id, settings.me, *seconds, auth, dialer
        )
    except BaseException:
        await network.close()
        raise
    network._closers = (*network._closers, membership.close)
    return network


async def _open_hivemind(settings: NetworkSettings, auth: PeerAuth, names: KnownNames) -> Network:
    from outer.membership.dht import open_dht
    from outer.membership.hivemind import HivemindMembership, open_messenger
    from outer.transports.hivemind import HivemindTransport
    from outer.transports.hivemind_addresses import choose_multiaddresses
    from outer.transports.hivemind_daemon import DaemonSettings, attach_daemon, start_daemon

    if settings.rank == 0:
        own = (settings.identity_path, settings.connect_seconds, settings.relay, auth)
        places = choose_multiaddresses(settings.listen_host, settings.listen_port, settings.announce_host)
        daemon = await start_daemon(DaemonSettings(*places, list(settings.bootstrap), *own))
    else:
        assert settings.leader_address is not None, "ranks above 0 need rank 0's leader_address"
        daemon = await attach_daemon(settings.leader_address, settings.rank, auth)
    try:
        transport = HivemindTransport(daemon, settings.run_id, settings.me, settings.connect_seconds)
        await transport.open()
        messenger = await open_messenger(daemon, settings.run_id, settings.me, transport.traffic)
        if settings.rank > 0:
            return Network(transport, messenger, auth.rejections, names, auth.island, _closers=[daemon.close])
        dht = await open_dht(daemon, settings.bootstrap, settings.connect_seconds)
        membership = HivemindMembership(dht, daemon, settings.run_id, settings.record_seconds, settings.bootstrap)
    except BaseException:
        await daemon.close()
        raise
    own = (auth.rejections, names, auth.island, membership, daemon.leader_address)
    closers = (membership.close, daemon.close)
    return Network(transport, messenger, *own, _closers=closers, wait_for_loss=daemon.wait_for_loss)


OPENERS = {"loopback": _open_loopback, "gloo": _open_gloo, "tls": _open_tls, "hivemind": _open_hivemind}
