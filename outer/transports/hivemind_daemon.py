"""A libp2p daemon: one process an island, started by rank 0; the other ranks attach to it.

It ends within seconds of its last rank, however that died, because it is told to stop when idle.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.utils.multiaddr import Multiaddr

from outer.errors import InputError, PeerLost
from outer.keys import Trust
from outer.transports.hivemind_addresses import (
    PeerAddress,
    check_bootstrap,
    check_multiaddresses,
    dialable,
    is_local,
    parse_address,
    unreachable,
)

IDLE_SECONDS = 3
"""The daemon ends when nobody has been attached for so long."""
START_SECONDS = 5.0
"""The least time a daemon gets to start, however short the wait for its peers."""
RETRY_SECONDS = 1.0
STALE_SECONDS = 10.0
NOT_ALLOWED = "its peer id is not in island.allow"


Relay = Literal["off", "client", "server"]
Accept = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one incoming stream, given the peer id that libp2p has proved."""


@dataclass(frozen=True)
class DaemonSettings:
    """How an island's daemon listens, and whom it meets first."""

    host_maddrs: Sequence[str]
    announce_maddrs: Sequence[str] | None = None
    bootstrap: Sequence[str] = ()
    """None: a swarm of its own."""
    identity_path: Path | None = None
    connect_seconds: float = 15.0
    relay: Relay = "off"
    trust: Trust = field(default_factory=Trust)


class Daemon:
    """A rank's hold on its island's libp2p daemon."""

    def __init__(self, p2p: P2P, rank: int, maddrs: Sequence[str], trust: Trust) -> None:
        assert p2p.peer_id is not None, "the daemon has not told its peer id"
        self.p2p, self._rank, self._trust = p2p, rank, trust
        self.peer_id = p2p.peer_id.to_base58()
        self.maddrs = tuple(maddrs)
        """Where other islands dial, each ending in /p2p/<peer id>."""
        self._is_closed = False

    @property
    def leader_address(self) -> str:
        """What other ranks of this island attach to."""
        listens_at = str(self.p2p._daemon_listen_maddr)  # pyright: ignore[reportAttributeAccessIssue]
        return ";".join((listens_at, *self.maddrs))

    @property
    def address(self) -> PeerAddress:
        """Where other islands reach this rank."""
        return PeerAddress(self.peer_id, self._rank, self.maddrs)

    async def serve(self, name: str, accept: Accept) -> None:
        """Give every incoming stream of this name to `accept`, but for those of peers that are not allowed."""

        async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer_id = info.peer_id.to_base58()
            if self._is_allowed(peer_id):
                await accept(peer_id, reader, writer)
            else:
                self._trust.refusals.add(peer_id, "peer", NOT_ALLOWED)
                writer.transport.abort()

        await self.p2p.add_binary_stream_handler(name, handle)

    async def open_stream(self, address: PeerAddress, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to a peer's `serve(name)`. The caller bounds the time. Raises PeerLost."""
        if not self._is_allowed(address.peer_id):
            self._trust.refusals.add(address.peer_id, "peer", NOT_ALLOWED)
            raise PeerLost(address.peer_id, NOT_ALLOWED)
        peer_id = PeerID.from_base58(address.peer_id)
        try:
            with suppress(P2PDaemonError):  # without an address that answers, the swarm may still know a way
                await self.dial(address)
            _, reader, writer = await self.p2p.call_binary_stream_handler(peer_id, name)
        except (P2PDaemonError, OSError, EOFError, ValueError) as error:
            raise PeerLost(address.peer_id, f"cannot open {name!r} there: {_first_line(error)}") from None
        return reader, writer

    async def dial(self, address: PeerAddress) -> None:
        """Connect the daemon to a peer, if it is not. The caller bounds the time. Raises P2PDaemonError."""
        client: Client = self.p2p._client  # pyright: ignore[reportAssignmentType]
        await client.connect(PeerID.from_base58(address.peer_id), [dialable(m) for m in address.maddrs])

    async def close(self) -> None:
        """End the daemon, or let go of it, and remove its sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(3):
                await self.p2p.shutdown()
        except TimeoutError:
            if self.p2p._child is not None:
                self.p2p._child.kill()

    def _is_allowed(self, peer_id: str) -> bool:
        return not self._trust.allow or peer_id in self._trust.allow


async def attach_daemon(leader_address: str, rank: int, trust: Trust) -> Daemon:
    """A hold on the daemon that rank 0 of this island started: an address of that daemon, then where others dial it."""
    quiet()
    listens_at, *maddrs = leader_address.split(";")
    p2p = await P2P.replicate(Multiaddr(listens_at))
    return Daemon(p2p, rank, maddrs, trust)


async def start_daemon(settings: DaemonSettings) -> Daemon:
    """A new daemon that has met its swarm. Raises InputError."""
    quiet()
    remove_stale_sockets()
    check_settings(settings)
    if settings.identity_path is not None:
        _ensure_identity(settings.identity_path)
    hosts, bootstrap = settings.host_maddrs, settings.bootstrap
    started, causes = time.monotonic(), []
    while True:
        left = settings.connect_seconds - (time.monotonic() - started)
        try:
            p2p = await P2P.create(
                host_maddrs=list(hosts),
                announce_maddrs=list(settings.announce_maddrs) if settings.announce_maddrs else None,
                initial_peers=list(bootstrap) or None,
                identity_path=str(settings.identity_path) if settings.identity_path else None,
                idle_timeout=IDLE_SECONDS,
                startup_timeout=max(left, START_SECONDS),
                nat_port_map=not is_local(hosts),
                check_if_identity_free=False,
                **_relay_options(settings),
            )
            visible = [str(m) for m in await p2p.get_visible_maddrs()]
            return Daemon(p2p, 0, [*visible, *_circuits(settings, visible[0])], settings.trust)
        except P2PDaemonError as error:
            causes.append(_first_line(error))
            remove_stale_sockets()
        waited = time.monotonic() - started
        if "bootstrap" not in causes[-1] and "failed to start in" not in causes[-1]:
            raise InputError(f"the libp2p daemon does not start on {', '.join(hosts)}: {causes[-1]}")
        if waited + RETRY_SECONDS >= settings.connect_seconds:
            raise InputError(unreachable(bootstrap, waited, causes[-1]))
        await asyncio.sleep(RETRY_SECONDS)


def _relay_options(settings: DaemonSettings) -> dict[str, Any]:
    """What P2P.create is told about NAT. Dialling through relays is always on: others may be behind one."""
    if settings.relay == "server":  # a daemon that does not believe it is reachable relays for nobody
        return {"force_reachability": "public", "auto_nat": True}
    if settings.relay == "client":
        relays = list(settings.bootstrap)
        return {"force_reachability": "private", "auto_nat": True, "use_auto_relay": True, "trusted_relays": relays}
    return {"auto_nat": not is_local(settings.host_maddrs)}


def _circuits(settings: DaemonSettings, visible: str) -> list[str]:
    """A relay client's addresses through each of its relays; it asks two of them to relay, and others try all."""
    peer = visible.rpartition("/p2p/")[2]
    return [f"{m}/p2p-circuit/p2p/{peer}" for m in settings.bootstrap] if settings.relay == "client" else []


def check_settings(settings: DaemonSettings) -> None:
    """Raise InputError for addresses and peer ids that are none, and for a relay client that knows no relay."""
    check_multiaddresses("listen_host and listen_port", settings.host_maddrs)
    check_bootstrap(settings.bootstrap)
    for peer_id in settings.trust.allow:
        try:
            parse_address(f"{peer_id}:0@")
        except PeerLost:
            raise InputError(
                f"island.allow: {peer_id!r} is no libp2p peer id; it is what follows /p2p/ in an island's address, "
                "12D3Koo... or Qm..."
            ) from None
    if settings.relay == "client" and not settings.bootstrap:
        raise InputError(
            "island.relay: client needs relays to be reached through: put the addresses of islands with "
            "island.relay=server into island.bootstrap"
        )


def quiet() -> None:
    """Let hivemind speak of errors only, and libp2p not at all."""
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    os.environ.setdefault("GOLOG_LOG_LEVEL", "fatal")


def remove_stale_sockets() -> None:
    """Remove the socket files that killed or failed daemons of this user, and their clients, have left behind."""
    for path in Path("/tmp").glob("hivemind-p2p*.sock"):  # hivemind's own fixed place
        with suppress(OSError):
            status = path.stat()
            # A client binds its socket a moment before it listens on it.
            is_old = path.name.startswith("hivemind-p2pd-") or time.time() - status.st_mtime > STALE_SECONDS
            if status.st_uid == os.getuid() and is_old and not _answers(path):
                path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


def _ensure_identity(path: Path) -> None:
    """Make a key if there is none, whole or not at all: half a key would keep the island from ever starting."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    P2P.generate_identity(str(temporary))
    temporary.replace(path)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
