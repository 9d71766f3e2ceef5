"""Addresses of endpoints over TLS: where one listens for payloads, and the key of the island that must answer there."""

import re
from dataclasses import dataclass

from outer.errors import InputError, PeerLost
from outer.identity.island_key import PUBLIC_KEY
from outer.network.endpoints import Endpoint

_ADDRESS = re.compile(rf"tls:({PUBLIC_KEY})@([A-Za-z0-9.:-]{{1,253}}):([0-9]{{1,5}})")
WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True)
class TlsAddress:
    """Its text form is `tls:<public key of the island>@<host>:<port>`."""

    key: str
    host: str
    port: int

    @property
    def place(self) -> tuple[str, int]:
        return self.host, self.port

    def __str__(self) -> str:
        return f"tls:{self.key}@{self.host}:{self.port}"


def parse_address(endpoint: Endpoint, text: str) -> TlsAddress:
    """Parse the address in a peer's record. Raises PeerLost if it is malformed, since the peer cannot be reached."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise PeerLost(endpoint.island, f"its record holds a malformed address of {endpoint}: {text[:80]!r}")
    return TlsAddress(found[1], found[2], int(found[3]))


def choose_announced_host(listen_host: str, announce_host: str | None) -> str:
    """The host that others are told. Raises InputError if it is not one at which they reach this machine."""
    host = announce_host or listen_host
    if host in WILDCARDS:
        raise InputError(
            f"island.announce_host: got none, and island.listen_host is {listen_host!r}; with outer.transport tls set "
            "island.announce_host to the address of this machine, or of its router, that the other islands reach"
        )
    return host
