"""What is true of each network between islands. Code asks these facts, never which network it is.

A new network adds its facts here, its name to `outer.transport`, a function that opens it to
`outer/connect/opening.py`, and a folder of its own in `outer/transports/`.
"""

from dataclasses import dataclass
from typing import Literal

PORTS_OF_TLS = 2
"""Ports of a rank over tls: one for calls, and the next for payloads."""

MeetingPlace = Literal["hub", "rendezvous", "dht"]
"""Where islands find each other: in a hub of their own process, at a TCP rendezvous, or in a
DHT.
"""


@dataclass(frozen=True)
class NetworkFacts:
    """Properties of one value of `outer.transport`. The defaults are those of a network over TCP of
    our own.
    """

    meets_at: MeetingPlace = "rendezvous"
    may_meet_in_dht: bool = False
    """Whether its islands may also meet in a DHT, given addresses of one as `island.bootstrap`."""
    listening_cure: str = ""
    """What to set in `island` so that islands on other machines reach this one."""
    ports_per_rank: int = 0
    """Ports that each rank listens on, from `island.listen_port` on; 0: the island has one port, or
    none.
    """
    opens_random_ports: bool = False
    """Whether payloads use further ports that the system chooses, which a firewall must let
    through.
    """
    needs_host: bool = False
    """Whether `island.listen_host` must be an address that other islands reach, and no wildcard."""
    announces_host: bool = False
    """Whether a wildcard as `island.listen_host` needs `island.announce_host`, or relays, beside
    it.
    """
    has_routes: bool = False
    """Whether islands may reach each other through a relay or a proxy, and by several addresses."""
    encrypts: bool = True
    payload_share: float = 0.91
    """Share of a link's rate that payloads get, measured at 100 Mbit/s. Frame headers leave at most
    0.956.
    """
    has_daemon: bool = False
    """Whether each rank's connections are held by a separate process, libp2p's daemon, from an
    optional package.
    """

    @property
    def leaves_process(self) -> bool:
        """Whether islands in different processes reach each other."""
        return self.meets_at != "hub"

    @property
    def rendezvous(self) -> Literal["tcp", "dht"]:
        """The kind of `diloco bootstrap` that lets its islands meet."""
        return "tcp" if self.meets_at == "rendezvous" else "dht"


NETWORKS: dict[str, NetworkFacts] = {
    "loopback": NetworkFacts(meets_at="hub", payload_share=1.0),
    "gloo": NetworkFacts(
        listening_cure="set island.listen_host to this machine's address in the network of the "
        "islands",
        ports_per_rank=1,
        opens_random_ports=True,
        needs_host=True,
        encrypts=False,
        payload_share=0.94,
    ),
    "tls": NetworkFacts(
        may_meet_in_dht=True,
        listening_cure="set island.listen_host=0.0.0.0 island.listen_port=PORT and "
        "island.announce_host to the address "
        "that others reach",
        ports_per_rank=PORTS_OF_TLS,
        announces_host=True,
        has_routes=True,
    ),
    "hivemind": NetworkFacts(
        meets_at="dht",
        may_meet_in_dht=True,
        listening_cure="set island.listen_host=0.0.0.0 island.listen_port=PORT and, behind a "
        "router or in a cloud, "
        "island.announce_host=PUBLIC_ADDRESS",
        has_daemon=True,
    ),
}
"""The facts of each network, by the name that `outer.transport` has for it."""
