"""Calls and records in a swarm that is connected by hivemind's DHT. The swarm survives the
island that started it.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hivemind.dht import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils.timed_storage import get_dht_time

from outer.errors import DifferingConfigsError, InputError, PeerLost
from outer.membership.base import Member
from outer.membership.dht.clocks import ClockWatch
from outer.membership.dht.node import RPC_SECONDS, bootstrap_addresses, close_dht, meet, open_dht
from outer.membership.dht.records import (
    find_members,
    find_records,
    list_runs,
    read_config,
    store_config,
    store_record,
)
from outer.membership.records import RunInfo, check_config_text, name_taken_error
from outer.network.endpoints import Endpoint, Traffic
from outer.network.rpc import StreamMessenger
from outer.network.run_key import PeerAuth, RunKey
from outer.transports.hivemind_addresses import PeerAddress, parse_address
from outer.transports.hivemind_daemon import Daemon, DaemonSettings, start_daemon, stream_name

log = logging.getLogger(__name__)

REFRESH_SECONDS = 4.0
CONFIG_SECONDS = 60.0
ANSWER_SECONDS = 0.5
"""`members` waits this long for the DHT and then returns the last known records, so that a dead
peer slows only one search."""
MEET_SECONDS = 3.0
"""Interval of pings to peers that the DHT has dropped."""
MAX_KNOWN_PEERS = 64


async def open_messenger(
    daemon: Daemon, run_id: str, me: Endpoint, traffic: Traffic
) -> StreamMessenger:
    async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        peer = parse_address(address)
        return await daemon.open_stream(peer, stream_name(run_id, "control", peer.rank))

    async def accept(
        peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await messenger.accept(reader, writer, peer_id)

    messenger = StreamMessenger(run_id, me, dial, traffic, daemon.auth)
    messenger.own_peer_id = daemon.peer_id
    messenger.find_hosts = daemon.hosts_of
    messenger.address = str(daemon.address)
    await daemon.serve(stream_name(run_id, "control", me.rank), accept)
    return messenger


class HivemindMembership:
    """A Membership (outer.membership.base) in hivemind's DHT. It owns the DHT node, but not the
    daemon.

    The DHT drops a peer that fails to answer once, so this class keeps pinging bootstrap peers and
    known islands. Otherwise a restarted bootstrap peer would know no other node, and the two sides
    of a network partition would never find each other.
    """

    def __init__(
        self,
        dht: DHTNode,
        daemon: Daemon,
        run_id: str,
        record_seconds: float,
        bootstrap: Sequence[str],
    ) -> None:
        self._dht = dht
        self._daemon = daemon
        self._run_id = run_id
        self._auth = daemon.auth
        self._record_seconds = record_seconds
        self._peers = bootstrap_addresses(bootstrap)
        """Addresses of bootstrap peers, by multiaddress, and addresses of islands, by name or by
        the peer id of their node."""
        self.remembers_nodes = False
        """Whether to keep pinging all nodes that were ever connected, because the islands'
        records do not name their nodes."""
        self._refresh_seconds = min(REFRESH_SECONDS, record_seconds / 3)
        self._own: Member | None = None
        self._config: str | None = None
        self._expires_at = 0.0
        self._known: dict[str, Member] = {}
        self._search: asyncio.Task[dict[str, Member]] | None = None
        self._refreshing: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._clocks = ClockWatch()

    async def announce(self, member: Member) -> None:
        assert member.identity == self._auth.island.public, (
            "a record is signed with the key that it names"
        )
        # An island that has had records in this run owns its name, even if another island claims it
        # now.
        is_new = self._auth.names is None or self._auth.names.newest(member.island) == 0
        if is_new and (others := await self._find_others(member)):
            raise name_taken_error(member.island, min(others))
        await self._store_record(member.island, member.encode())
        # Two new islands that announce at the same time both pass the first check. Then the lower
        # key continues.
        if is_new and (others := await self._find_others(member)) and min(others) < member.identity:
            await self._store_record(member.island, b"")
            raise name_taken_error(member.island, min(others))
        self._own = member
        self._keep_refreshing()

    def update(self, member: Member) -> None:
        if self._own is None:
            return
        self._own = member
        self._wake.set()

    async def members(self) -> dict[str, Member]:
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(find_members(self._dht, self._run_id, self._auth))
        await asyncio.wait({self._search}, timeout=ANSWER_SECONDS)
        if self._search.done():
            self._known = self._search.result()
            for member in self._known.values():
                with suppress(PeerLost, IndexError):
                    if member.island in self._peers or len(self._peers) < MAX_KNOWN_PEERS:
                        self._peers[member.island] = parse_address(member.control_addresses[0])
        own = {self._own.island: self._own} if self._own else {}
        return dict(sorted((self._known | own).items()))

    async def publish_config(self, text: str) -> None:
        check_config_text(text)
        try:
            self._config = await self.read_config() or text
        except DifferingConfigsError as error:
            log.warning("%s; this island uses its own", error)
            self._config = text
        await self._store_config()
        self._keep_refreshing()

    async def read_config(self) -> str | None:
        return await read_config(self._dht, self._run_id, self._auth.key, self._auth.island.public)

    async def leave(self) -> None:
        own = self._own
        self._own = None
        if own is not None:
            with suppress(
                TimeoutError, P2PDaemonError, OSError, EOFError
            ):  # the daemon may have died already
                async with asyncio.timeout(RPC_SECONDS):
                    await self._store_record(own.island, b"")

    async def close(self) -> None:
        """Stop refreshing and leave the DHT. Idempotent."""
        for task in (*self._refreshing, *([self._search] if self._search else [])):
            task.cancel()
        await close_dht(self._dht)

    @property
    def trouble(self) -> str:
        return self._clocks.trouble

    def _keep_refreshing(self) -> None:
        if not self._refreshing:
            self._refreshing = [
                asyncio.create_task(work) for work in (self._refresh(), self._ping_lost_peers())
            ]

    async def _ping_lost_peers(self) -> None:
        while True:
            await asyncio.sleep(MEET_SECONDS)
            table = self._dht.protocol.routing_table
            self._remember([peer_id.to_base58() for peer_id in table.peer_id_to_uid])
            lost = [
                a
                for a in self._peers.values()
                if table.get(peer_id=PeerID.from_base58(a.peer_id)) is None
            ]
            await asyncio.gather(
                *(
                    meet(self._dht, self._daemon, a)
                    for a in lost
                    if a.peer_id != self._daemon.peer_id
                )
            )
            await self._clocks.look(self._dht)

    def _remember(self, peer_ids: Sequence[str]) -> None:
        """Remember nodes without addresses: the libp2p daemon knows the addresses of peers to
        which it was connected.
        """
        if self.remembers_nodes:
            known = {address.peer_id for address in self._peers.values()}
            for peer_id in peer_ids[: MAX_KNOWN_PEERS - len(self._peers)]:
                if peer_id not in known:
                    self._peers[peer_id] = PeerAddress(peer_id, 0, ())

    async def _refresh(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_seconds):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if self._own is not None:
                    await self._store_record(self._own.island, self._own.encode())
                await self._store_config()
            except Exception:  # the refresh must survive any single failure
                log.warning(
                    "the DHT did not accept this island's record; it will be sent again",
                    exc_info=True,
                )

    async def _find_others(self, member: Member) -> set[str]:
        """Return the keys of other islands that claim this island's name."""
        records = await find_records(self._dht, self._run_id, self._auth.key)
        claims = [record for record in records if record.member.island == member.island]
        # An earlier process of this island may have announced shortly before, on a clock that was
        # ahead.
        own = [record.expires_at for record in claims if record.member.identity == member.identity]
        self._expires_at = max([self._expires_at, *own])
        return {record.member.identity for record in claims} - {member.identity}

    async def _store_record(self, island: str, body: bytes) -> None:
        # The DHT replaces a record only by one that expires later.
        self._expires_at = max(get_dht_time() + self._record_seconds, self._expires_at + 0.01)
        await store_record(self._dht, self._run_id, self._auth, island, body, self._expires_at)

    async def _store_config(self) -> None:
        if self._config is not None:
            await store_config(
                self._dht, self._run_id, self._auth, self._config, get_dht_time() + CONFIG_SECONDS
            )


async def find_runs_in_swarm(
    address: str, connect_seconds: float, key: RunKey | None, run_name: str | None = None
) -> dict[str, RunInfo]:
    """Return the runs in the swarm that the key opens, by id. A run `run_name` is read directly,
    without the list of runs, from which strangers may push it out.

    Raises InputError if the swarm is unreachable, the key opens no run, or the config of a run
    cannot be determined.
    """
    # This node only sends requests, so other nodes need not reach it.
    settings = DaemonSettings(
        ["/ip4/127.0.0.1/tcp/0"], bootstrap=[address], connect_seconds=connect_seconds
    )
    daemon = await start_daemon(settings)
    try:
        dht = await open_dht(daemon, [address], connect_seconds)
        runs, refused = await _read_runs(dht, [run_name] if run_name else [], key)
        if not runs and not refused:
            runs, refused = await _read_runs(dht, await list_runs(dht), key)
        await close_dht(dht)
    finally:
        await daemon.close()
    if refused and not runs:
        raise refused[0]
    return runs


async def _read_runs(
    dht: DHTNode, names: Sequence[str], key: RunKey | None
) -> tuple[dict[str, RunInfo], list[InputError]]:
    """Return the runs with these names that exist, and the errors of runs that cannot be read."""
    runs: dict[str, RunInfo] = {}
    refused: list[InputError] = []
    for name in names:
        try:
            text = await read_config(dht, name, key)
            if text is not None:
                runs[name] = RunInfo(text, tuple(await find_members(dht, name, PeerAuth(key))))
        except InputError as error:
            refused.append(error)
    return runs, refused


@dataclass
class BootstrapPeer:
    """A DHT peer that does not train."""

    addresses: tuple[str, ...]
    """Multiaddresses for the islands' setting `island.bootstrap`."""
    _daemon: Daemon
    _dht: DHTNode

    async def close(self) -> None:
        await close_dht(self._dht)
        await self._daemon.close()


async def serve_bootstrap(host_maddrs: Sequence[str], identity_path: Path | None) -> BootstrapPeer:
    daemon = await start_daemon(DaemonSettings(host_maddrs, identity_path=identity_path))
    return BootstrapPeer(daemon.maddrs, daemon, await open_dht(daemon, []))
