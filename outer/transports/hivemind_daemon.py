"""The libp2p daemon of an island's node: one process. The node's first rank starts it, and the
other ranks attach to it.

The daemon stops when idle, so it ends within seconds after the node's last rank, in whatever way
that rank ended.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.utils.multiaddr import Multiaddr

from outer.errors import InputError, PeerLost, UnreachableError, first_line
from outer.identity.files import file_beside
from outer.network.endpoints import Lane
from outer.network.retry import retry
from outer.network.run_key import PeerAuth
from outer.transports.hivemind_addresses import (
    PeerAddress,
    check_bootstrap,
    check_multiaddresses,
    find_taken,
    host_of,
    is_local,
    parse_address,
    to_dialable,
    unreachable_message,
)
from outer.transports.hivemind_sockets import (
    named_p2p,
    next_prefix,
    remove_dead_sockets,
    remove_sockets,
)

IDLE_SECONDS = 3
PORT_SECONDS = 2.0 * IDLE_SECONDS
"""Longest wait for a port on which the daemon of this island's last process may still listen."""
START_SECONDS = 5.0
"""A daemon has at least this time to start, even if the wait for its peers is shorter."""
RETRY_SECONDS = 1.0
GOODBYE_SECONDS = 2.0
"""Longest time to close a daemon that has ended because a signal was sent to it and this
process."""
NOT_ALLOWED = "its peer id is not in island.allow, or banned"

RelayMode = Literal["off", "client", "server"]
StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Function that serves one incoming stream, given the peer id that libp2p has authenticated."""


@dataclass(frozen=True)
class DaemonSettings:
    """Addresses on which a node's daemon listens, and the peers that it connects to first."""

    host_maddrs: Sequence[str]
    announce_maddrs: Sequence[str] | None = None
    bootstrap: Sequence[str] = ()
    """Multiaddresses of peers. Without any, the daemon starts a swarm of its own."""
    identity_path: Path | None = None
    connect_seconds: float = 15.0
    relay: RelayMode = "off"
    auth: PeerAuth = field(default_factory=PeerAuth)
    rank: int = 0
    """The rank that starts the daemon."""


class Daemon:
    """A rank's client of its node's libp2p daemon."""

    def __init__(self, p2p: P2P, rank: int, maddrs: Sequence[str], auth: PeerAuth) -> None:
        assert p2p.peer_id is not None, "the daemon has not reported its peer id"
        self.p2p = p2p
        self.auth = auth
        self.peer_id = p2p.peer_id.to_base58()
        self.maddrs = tuple(maddrs)
        """Multiaddresses that other islands dial, each ending in /p2p/<peer id>."""
        self.address = PeerAddress(self.peer_id, rank, self.maddrs)
        self._is_closed = False

    @property
    def local_address(self) -> str:
        """Address to which the other ranks of this node attach."""
        return ";".join((str(self.p2p._daemon_listen_maddr), *self.maddrs))  # pyright: ignore[reportAttributeAccessIssue]

    async def serve(self, name: str, accept: StreamHandler) -> None:
        """Pass every incoming stream of this name to `accept`, except streams of peers that are not
        allowed.
        """

        async def handle(
            info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            peer_id = info.peer_id.to_base58()
            if self.auth.access.may_connect(peer_id):
                await accept(peer_id, reader, writer)
            else:
                self.auth.rejections.add(peer_id, "peer", NOT_ALLOWED)
                writer.transport.abort()

        await self.p2p.add_binary_stream_handler(name, handle)

    async def open_stream(
        self, address: PeerAddress, name: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to the peer's handler `name`. The caller limits the time. Raises
        PeerLost.
        """
        if not self.auth.access.may_connect(address.peer_id):
            self.auth.rejections.add(address.peer_id, "peer", NOT_ALLOWED)
            raise PeerLost(address.peer_id, NOT_ALLOWED)
        peer_id = PeerID.from_base58(address.peer_id)
        try:
            with suppress(
                P2PDaemonError
            ):  # if no address answers, the swarm may still find a route
                await self.dial(address)
            _, reader, writer = await self.p2p.call_binary_stream_handler(peer_id, name)
        except (P2PDaemonError, OSError, EOFError, ValueError) as error:
            raise PeerLost(
                address.peer_id, f"cannot open {name!r} there: {first_line(error)}"
            ) from None
        return reader, writer

    async def dial(self, address: PeerAddress) -> None:
        """Connect the daemon to a peer, unless it is connected. The caller limits the time.
        Raises P2PDaemonError.
        """
        client: Client = self.p2p._client  # pyright: ignore[reportAssignmentType]
        await client.connect(
            PeerID.from_base58(address.peer_id), [to_dialable(m) for m in address.maddrs]
        )

    async def hosts_of(self, peer_id: str) -> Collection[str]:
        """Return the hosts at the other ends of the connections with a peer. For a relayed
        connection this is the relay's host.
        """
        connected = await self.p2p.list_peers()
        maddrs = [
            str(maddr)
            for peer in connected
            if peer.peer_id.to_base58() == peer_id
            for maddr in peer.addrs
        ]
        return {host_of(maddr) for maddr in maddrs}

    async def wait_for_loss(self) -> str:
        """Wait until the daemon ends, and return how, or "" if it was closed. Only on the rank
        that started it.
        """
        child = cast("asyncio.subprocess.Process | None", self.p2p._child)
        assert child is not None, "another rank has started the daemon"
        status = await child.wait()
        await asyncio.sleep(GOODBYE_SECONDS)
        if self._is_closed:
            return ""
        how = (
            f"was ended by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}"
        )
        return f"the libp2p daemon of this node {how}, and with it all of its connections"

    async def close(self) -> None:
        """Detach from the daemon, which ends if this rank started it, and remove its sockets.
        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(3):
                await self.p2p.shutdown()
        except TimeoutError:
            if self.p2p._child is not None:
                self.p2p._child.kill()
        # Also of other daemons that are dead, because perhaps no other process starts here.
        remove_dead_sockets()


async def attach_daemon(local_address: str, rank: int, auth: PeerAuth) -> Daemon:
    """Attach to the daemon that another rank of this node has started, given its `local_address`.
    Raises InputError.
    """
    silence_libraries()
    listens_at, *maddrs = local_address.split(";")
    try:
        return Daemon(
            await named_p2p(next_prefix()).replicate(Multiaddr(listens_at)), rank, maddrs, auth
        )
    except OSError as error:
        raise InputError(
            f"the libp2p daemon of this node does not answer at {listens_at}: "
            f"{error.strerror or error}; it has ended, or ranks of different nodes or containers "
            "have the same host name and node number (LOCAL_RANK): start them with torchrun or "
            "`diloco launch`"
        ) from None


async def start_daemon(settings: DaemonSettings) -> Daemon:
    """Start a daemon and connect it to its swarm. Raises InputError when it does not start or no
    peer answers.
    """
    silence_libraries()
    remove_dead_sockets()
    check_settings(settings)
    if settings.identity_path is not None:
        _ensure_identity(settings.identity_path)
    await _wait_for_port(settings.host_maddrs)
    started = time.monotonic()
    cause = ""

    async def attempt() -> P2P | None:
        nonlocal cause
        try:
            return await _create_p2p(
                settings, settings.connect_seconds - (time.monotonic() - started)
            )
        except P2PDaemonError as error:
            cause = first_line(error)
        if "bootstrap" not in cause and "failed to start in" not in cause:
            raise InputError(
                f"the libp2p daemon does not start on {', '.join(settings.host_maddrs)}: {cause}"
            )
        return None

    p2p = await retry(
        attempt, seconds=settings.connect_seconds - RETRY_SECONDS, pause_seconds=RETRY_SECONDS
    )
    if p2p is None:
        raise UnreachableError(
            unreachable_message(settings.bootstrap, time.monotonic() - started, cause)
        )
    maddrs = [str(m) for m in await p2p.get_visible_maddrs()]
    if (
        settings.relay == "client"
    ):  # it uses two of the relays, and others try to reach it through all
        peer = maddrs[0].rpartition("/p2p/")[2]
        maddrs += [f"{m}/p2p-circuit/p2p/{peer}" for m in settings.bootstrap]
    return Daemon(p2p, settings.rank, maddrs, settings.auth)


async def _wait_for_port(host_maddrs: Sequence[str]) -> None:
    """Wait for a short time until no other process listens at these addresses. Raises InputError
    if one still does.
    """

    async def is_free() -> bool:
        return find_taken(host_maddrs) is None

    if not await retry(is_free, seconds=PORT_SECONDS, pause_seconds=RETRY_SECONDS):
        raise InputError(
            f"cannot listen on {find_taken(host_maddrs)}: Address already in use; choose another "
            "port"
        )


async def _create_p2p(settings: DaemonSettings, seconds_left: float) -> P2P:
    prefix = next_prefix()
    try:
        return await _create_named(prefix, settings, seconds_left)
    except BaseException:
        remove_sockets(prefix)
        raise


async def _create_named(prefix: str, settings: DaemonSettings, seconds_left: float) -> P2P:
    return await named_p2p(prefix).create(
        host_maddrs=list(settings.host_maddrs),
        announce_maddrs=list(settings.announce_maddrs) if settings.announce_maddrs else None,
        initial_peers=list(settings.bootstrap) or None,
        identity_path=str(settings.identity_path) if settings.identity_path else None,
        idle_timeout=IDLE_SECONDS,
        startup_timeout=max(seconds_left, START_SECONDS),
        # With this option the daemon looks for a router over UDP on all addresses, where any host
        # may answer. So it must be requested.
        nat_port_map=settings.relay == "client",
        check_if_identity_free=False,
        **_relay_options(settings),
    )


def _relay_options(settings: DaemonSettings) -> dict[str, Any]:
    """Options of P2P.create for NAT. Dialling through relays is always on, because other peers may
    be behind one.
    """
    if settings.relay == "server":  # a daemon relays only if it assumes that it is reachable
        return {"force_reachability": "public", "auto_nat": True}
    if settings.relay == "client":
        relays = list(settings.bootstrap)
        return {
            "force_reachability": "private",
            "auto_nat": True,
            "use_auto_relay": True,
            "trusted_relays": relays,
        }
    return {"auto_nat": not is_local(settings.host_maddrs)}


def check_settings(settings: DaemonSettings) -> None:
    """Raise InputError for malformed addresses and peer ids, and for a relay client that knows no
    relay.
    """
    check_multiaddresses("listen_host and listen_port", settings.host_maddrs)
    check_bootstrap(settings.bootstrap)
    for peer_id in settings.auth.access.peer_ids:
        try:
            parse_address(f"{peer_id}:0@")
        except PeerLost:
            raise InputError(
                f"island.allow: {peer_id!r} is neither an island's key (64 hexadecimal digits, as "
                "`diloco key` prints it) nor a libp2p peer id; the id follows /p2p/ in an island's "
                "address, 12D3Koo... or Qm..."
            ) from None
    if settings.relay == "client" and not settings.bootstrap:
        raise InputError(
            "island.relay: client needs relays to be reached through: put the addresses of islands "
            "with island.relay=server into island.bootstrap"
        )


def stream_name(run_id: str, purpose: Lane, rank: int) -> str:
    return f"diloco/{run_id}/{purpose}/{rank}"


def silence_libraries() -> None:
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    os.environ.setdefault("GOLOG_LOG_LEVEL", "fatal")


def _ensure_identity(path: Path) -> None:
    """Create the key file atomically if there is none, because an island cannot start with half a
    key.
    """
    if path.exists():
        return
    with file_beside(path) as beside:
        P2P.generate_identity(str(beside))
        beside.replace(path)
