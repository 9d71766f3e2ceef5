"""A node of the DHT for islands whose calls and payloads do not use libp2p: the islands over
tls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outer.membership.dht.membership import HivemindMembership
from outer.membership.dht.node import open_dht
from outer.network.run_key import PeerAuth
from outer.transports.hivemind_addresses import choose_multiaddresses
from outer.transports.hivemind_daemon import Daemon, DaemonSettings, start_daemon

NOWHERE = ["/ip4/127.0.0.1/tcp/0"]


@dataclass(frozen=True)
class NodePlace:
    """The place where an island's node listens. Without a `host` the node only sends requests,
    and stores nothing for others.
    """

    host: str | None
    port: int = 0
    announce_host: str | None = None
    identity_path: Path | None = None

    @property
    def only_asks(self) -> bool:
        """Whether other nodes cannot reach this one, or only at a port that could not be
        forwarded to it.
        """
        return self.host is None or (self.announce_host is not None and self.port == 0)


@dataclass(frozen=True)
class Meeting:
    """The run whose islands meet, the longest wait for the swarm, and the lifetime of a record,
    both in seconds.
    """

    run_id: str
    bootstrap: Sequence[str]
    connect_seconds: float
    record_seconds: float


async def open_dht_beside(
    meeting: Meeting, place: NodePlace, auth: PeerAuth
) -> tuple[HivemindMembership, Daemon]:
    """Open a membership in the DHT and the libp2p daemon that it needs. Close the membership first,
    then the daemon.

    Raises InputError if the daemon does not start or no peer of the DHT answers.
    """
    listen = NOWHERE
    announce = None
    if place.host is not None and not place.only_asks:
        listen, announce = choose_multiaddresses(place.host, place.port, place.announce_host)
    own = (place.identity_path, meeting.connect_seconds, "off", auth)
    daemon = await start_daemon(DaemonSettings(listen, announce, meeting.bootstrap, *own))
    try:
        dht = await open_dht(
            daemon, meeting.bootstrap, meeting.connect_seconds, only_asks=place.only_asks
        )
    except BaseException:
        await daemon.close()
        raise
    membership = HivemindMembership(
        dht, daemon, meeting.run_id, meeting.record_seconds, meeting.bootstrap
    )
    membership.remembers_nodes = True
    return membership, daemon
