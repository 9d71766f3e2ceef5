"""Text addresses of libp2p peers: multiaddresses and the addresses in islands' records, with their
checks.
"""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from outer.errors import InputError, PeerLost

MAX_ADDRESS_LENGTH = 4096
MAX_PEER_ADDRESSES = 32
# /p2p and /p2p-circuit in a binary multiaddress
P2P_CODE = b"\xa5\x03"
CIRCUIT_CODE = b"\xa2\x02"


@dataclass(frozen=True)
class PeerAddress:
    """Address of a rank of a peer. Its text form is `<peer
    id>:<rank>@<multiaddress>;<multiaddress>...`.
    """

    peer_id: str
    rank: int
    maddrs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.peer_id}:{self.rank}@{';'.join(self.maddrs)}"


def parse_address(text: str) -> PeerAddress:
    """Parse the address in a peer's record. Raises PeerLost if it is malformed, since the peer
    cannot be reached.
    """
    try:
        if len(text) > MAX_ADDRESS_LENGTH:
            raise ValueError("too long")
        endpoint, _, joined = text.partition("@")
        peer_id, _, rank = endpoint.partition(":")
        maddrs = tuple(str(Multiaddr(m)) for m in joined.split(";")[:MAX_PEER_ADDRESSES] if m)
        key = PeerID.from_base58(peer_id)
        raw = key.to_bytes()  # a multihash: its kind, its length, and its bytes
        if not 32 <= len(raw) <= 64 or raw[1] != len(raw) - 2:
            raise ValueError("not a peer id")
        for maddr in maddrs:
            to_dialable(maddr)
        return PeerAddress(key.to_base58(), int(rank), maddrs)
    except Exception as error:  # noqa: BLE001 - the parsers raise errors of many types
        raise PeerLost(text[:80], f"its address is malformed: {error}") from None


def check_bootstrap(bootstrap: Sequence[str]) -> None:
    """Raise InputError unless every address is a multiaddress with a peer id."""
    check_multiaddresses("island.bootstrap", bootstrap)
    for address in bootstrap:
        if "/p2p/" not in address:
            raise InputError(
                f"island.bootstrap: got {address!r}, which has no peer id; use the whole line that "
                "`diloco bootstrap` prints: /ip4/HOST/tcp/PORT/p2p/PEER_ID"
            )


def check_multiaddresses(where: str, addresses: Sequence[str]) -> None:
    """Raise InputError, which begins with the setting `where`, unless every address is a
    multiaddress.
    """
    for address in addresses:
        try:
            Multiaddr(address)
        except Exception as error:  # noqa: BLE001 - the parser raises errors of many types
            text = (
                f"{where}: {address!r} is not a multiaddress ({error}); e.g. "
                "/ip4/10.0.0.1/tcp/31337"
            )
            raise InputError(text) from None


def find_taken(addresses: Sequence[str]) -> str | None:
    """Return the first of these multiaddresses at which another process listens already, or None.

    libp2p would share the port with that process, and a dialer would reach one of the two by
    chance.
    """
    for address in addresses:
        _, _, host, protocol, port, *_ = [*address.split("/"), "", ""]
        if protocol == "tcp" and port not in ("", "0") and _is_taken(host, int(port)):
            return address
    return None


def _is_taken(host: str, port: int) -> bool:
    """Return whether another process listens there. libp2p reports all other problems itself."""
    with suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                return error.errno == errno.EADDRINUSE
    return False


def make_multiaddress(host: str, port: int) -> str:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return f"/dns/{host}/tcp/{port}"
    return f"/ip{version}/{host}/tcp/{port}"


def host_of(maddr: str) -> str:
    """Return the host at the beginning of a multiaddress. For a route through a relay this is
    the relay's host.
    """
    _, _, host, *_ = [*maddr.split("/"), "", ""]
    return host


def choose_multiaddresses(
    listen_host: str, listen_port: int, announce_host: str | None
) -> tuple[list[str], list[str] | None]:
    """Return the multiaddresses to listen on, and those to announce if they differ. Raises
    InputError.
    """
    listen = [make_multiaddress(listen_host, listen_port)]
    if announce_host is None:
        return listen, None
    if listen_port == 0:
        raise InputError(
            "island.announce_host needs a fixed island.listen_port: got 0; set the port that is "
            "forwarded"
        )
    return listen, [make_multiaddress(announce_host, listen_port)]


def is_local(host_maddrs: Sequence[str]) -> bool:
    return all(m.startswith(("/ip4/127.", "/ip6/::1/")) for m in host_maddrs)


def to_dialable(maddr: str) -> Multiaddr:
    """Convert an address to the form that the daemon dials: without the peer's own id, and with a
    relay's id as plain bytes.

    hivemind's Multiaddr writes ids as CIDs, which the daemon cannot read in binary addresses.
    """
    if "/p2p-circuit" not in maddr:
        return Multiaddr(maddr.partition("/p2p/")[0])
    host, _, relay = maddr.partition("/p2p-circuit")[0].partition("/p2p/")
    raw = PeerID.from_base58(relay).to_bytes()
    return Multiaddr(Multiaddr(host).to_bytes() + P2P_CODE + bytes([len(raw)]) + raw + CIRCUIT_CODE)


def unreachable_message(bootstrap: Sequence[str], waited: float, cause: str) -> str:
    return (
        f"island.bootstrap: none of these addresses answered within {waited:.0f} s: "
        f"{', '.join(bootstrap)} ({cause}); check that `diloco bootstrap` or another island runs "
        "there and that its port is open"
    )
