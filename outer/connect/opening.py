"""Opens the connections of one rank: a transport, a messenger and, on rank 0, the membership, all
of one kind.
"""

from outer.agreement.proofs.signer import IslandSigner
from outer.config import NETWORKS, PORTS_OF_TLS
from outer.connect.meeting import meet
from outer.connect.settings import Network, NetworkSettings
from outer.errors import InputError
from outer.identity.access import Access
from outer.identity.island_key import IslandKey
from outer.identity.known_names import KnownNames
from outer.identity.tls import TlsIdentity
from outer.membership.rendezvous_link import check_rendezvous_addresses, is_of_dht
from outer.network.endpoints import Traffic
from outer.network.rejections import Rejections
from outer.network.retry import retry_unreachable
from outer.network.rpc import StreamMessenger
from outer.network.run_key import PeerAuth
from outer.packages import require_hivemind
from outer.routes.addresses import Door, find_key, parse_relays
from outer.routes.dialer import Dialer
from outer.routes.proxy import parse_proxy
from outer.routes.registration import Accept, Registrant, Registrations
from outer.routes.streams import find_port, listen, serve_connection
from outer.transports.tls.addresses import build_address, choose_announced_host


async def open_network(kind: str, settings: NetworkSettings) -> Network:
    """Open this rank's network on the running event loop. Raises InputError on failure.

    Rank 0 must open first. With hivemind, the first rank of each other node opens next, and the
    others last.
    """
    if kind not in OPENERS:
        raise InputError(f"outer.transport: got {kind!r}; allowed: {', '.join(OPENERS)}")
    auth, names = _build_auth(settings)
    facts = NETWORKS[kind]
    if not facts.has_daemon and settings.relay != "off":
        raise InputError(
            f"island.relay: it is for libp2p peers, but outer.transport is {kind!r}; use hivemind, "
            "or leave it out"
        )
    for name in () if facts.has_routes else ("relays", "proxy"):
        if getattr(settings, name):
            raise InputError(
                f"island.{name}: it is for outer.transport tls, but this is {kind!r}; leave it out"
            )
    if not facts.has_daemon and auth.access.peer_ids:
        raise InputError(
            f"island.allow: {auth.access.peer_ids[0]!r} is not an island's key (64 hexadecimal "
            "digits, as `diloco key` "
            f"prints it), and libp2p peer ids are for outer.transport hivemind; it is {kind!r}"
        )
    opened = retry_unreachable(
        lambda: OPENERS[kind](settings, auth, names), names.knows_others(settings.island)
    )
    network = await opened
    network.signer = IslandSigner(auth.island, names, settings.run_id, auth.access)
    return network


def _build_auth(settings: NetworkSettings) -> tuple[PeerAuth, KnownNames]:
    """Return the means by which this rank authenticates its peers, and the owners of names.
    Raises InputError.
    """
    key = settings.island_key or IslandKey.generate()
    names = KnownNames(settings.names_path)
    if problem := names.claim(settings.island, key.public):
        raise InputError(
            f"island.name: {problem}according to {settings.names_path or 'the run'}; restore the "
            "island's old key, or choose another name"
        )
    access = Access(frozenset(settings.allow), settings.ban_files)
    return PeerAuth(settings.run_key, Rejections(), key, names, access=access), names


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
    membership = (
        LoopbackMembership(hub, settings.run_id, settings.island) if settings.rank == 0 else None
    )
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
    messenger = await _open_messenger(
        settings, "gloo", auth, port, settings.announce_host or host, Dialer()
    )
    transport = GlooTransport(
        settings.me, messenger, messenger.traffic, host, settings.connect_seconds
    )
    if auth.key is not None:
        transport = SealedTransport(transport, auth, settings.run_id, settings.me)
    network = Network(transport, messenger, auth.rejections, names, auth.island)
    return await meet(settings, network, auth)


async def _open_tls(settings: NetworkSettings, auth: PeerAuth, names: KnownNames) -> Network:
    from outer.transports.tls.transport import TlsTransport

    host = settings.listen_host
    tls = TlsIdentity()
    dialer = Dialer(parse_proxy(settings.proxy))
    relays = parse_relays(settings.relays)
    rank = settings.rank
    key = auth.island
    announced = choose_announced_host(host, settings.announce_host, relays)
    port = settings.listen_port + PORTS_OF_TLS * rank if settings.listen_port else 0
    messenger = await _open_messenger(settings, "tls", auth, port, host, dialer)
    messenger.tls = tls
    messenger.find_key = find_key
    messenger.on_failure = dialer.blame
    messenger.address = build_address(
        key.public, announced, find_port(messenger), relays, rank, "calls"
    )
    own = (messenger.traffic, settings.connect_seconds, settings.tls_streams, dialer)
    transport = TlsTransport(settings.run_id, settings.me, auth, tls, *own)
    try:
        await transport.open(host, port and port + 1, announced, relays)
    except OSError as error:
        await messenger.close()
        raise _cannot_listen(host, port and port + 1, error) from None
    accept: dict[Door, Accept] = {
        "calls": lambda one: serve_connection(messenger, one),
        "payloads": transport.accept,
    }
    registrations = Registrations(relays, Registrant(key, rank, auth.key, dialer, accept))
    network = Network(
        transport, messenger, auth.rejections, names, key, _closers=[registrations.close]
    )
    if announced is None:
        try:
            await registrations.wait_for_one(settings.connect_seconds)
        except BaseException:
            await network.close()
            raise
    return await meet(settings, network, auth, dialer, is_reachable=announced is not None)


async def _open_messenger(
    settings: NetworkSettings, kind: str, auth: PeerAuth, port: int, announced: str, dialer: Dialer
) -> StreamMessenger:
    """Listen for calls and return the messenger. Raises InputError, also for addresses that are
    not of a rendezvous.
    """
    if not NETWORKS[kind].may_meet_in_dht or not is_of_dht(settings.bootstrap):
        check_rendezvous_addresses(kind, settings.bootstrap)
    messenger = StreamMessenger(settings.run_id, settings.me, dialer.open_streams, Traffic(), auth)
    try:
        return await listen(messenger, settings.listen_host, port, announced)
    except OSError as error:
        raise _cannot_listen(settings.listen_host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> InputError:
    return InputError(
        f"island.listen_host, island.listen_port: cannot listen on {host}:{port}: "
        f"{error.strerror}; choose an address of this machine and a free port (0: any)"
    )


async def _open_hivemind(settings: NetworkSettings, auth: PeerAuth, names: KnownNames) -> Network:
    require_hivemind("outer.transport=hivemind")
    from outer.membership.dht.membership import HivemindMembership, open_messenger
    from outer.membership.dht.node import open_dht
    from outer.transports.hivemind import HivemindTransport
    from outer.transports.hivemind_addresses import choose_multiaddresses
    from outer.transports.hivemind_daemon import DaemonSettings, attach_daemon, start_daemon

    starts_daemon = settings.daemon_address is None
    if settings.daemon_address is None:
        own = (
            settings.identity_path,
            settings.connect_seconds,
            settings.relay,
            auth,
            settings.rank,
        )
        places = choose_multiaddresses(
            settings.listen_host, settings.listen_port, settings.announce_host
        )
        daemon = await start_daemon(DaemonSettings(*places, list(settings.bootstrap), *own))
    else:
        daemon = await attach_daemon(settings.daemon_address, settings.rank, auth)
    try:
        transport = HivemindTransport(
            daemon, settings.run_id, settings.me, settings.connect_seconds
        )
        await transport.open()
        messenger = await open_messenger(daemon, settings.run_id, settings.me, transport.traffic)
        network = Network(
            transport,
            messenger,
            auth.rejections,
            names,
            auth.island,
            daemon_address=daemon.local_address,
        )
        network._closers = [daemon.close]
        network.wait_for_loss = daemon.wait_for_loss if starts_daemon else None
        if settings.rank > 0:
            return network
        dht = await open_dht(daemon, settings.bootstrap, settings.connect_seconds)
        membership = HivemindMembership(
            dht, daemon, settings.run_id, settings.record_seconds, settings.bootstrap
        )
    except BaseException:
        await daemon.close()
        raise
    network.membership = membership
    network._closers = (membership.close, daemon.close)
    return network


OPENERS = {
    "loopback": _open_loopback,
    "gloo": _open_gloo,
    "tls": _open_tls,
    "hivemind": _open_hivemind,
}
