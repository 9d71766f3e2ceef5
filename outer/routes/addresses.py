"""Addresses of islands over TLS: the island's key, and the routes by which a connection reaches one
of its ranks.

    tls:<public key of the island>@203.0.113.7:31400;198.51.100.2:31500/0/calls

A route is `host:port`, where the rank itself listens, or `host:port/rank/door`, where a relay
connects to that rank.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outer.errors import InputError, MessageError
from outer.identity.island_key import PUBLIC_KEY

SCHEME = "tls:"
MAX_ROUTES = 16
WILDCARDS = ("", "0.0.0.0", "::")
_ROUTE = re.compile(r"([A-Za-z0-9.:\[\]-]{1,253}):([0-9]{1,5})(?:/([0-9]{1,4})/(calls|payloads))?")
_ADDRESS = re.compile(rf"{SCHEME}({PUBLIC_KEY})@(.+)")

Door = Literal["calls", "payloads"]
"""Purpose of the connections that a rank accepts."""


@dataclass(frozen=True)
class RelayTarget:
    """The rank to which a relay connects, and the purpose of the connection."""

    rank: int
    door: Door


@dataclass(frozen=True)
class Route:
    """A host and port to connect to. With `behind` a relay listens there, otherwise the rank
    itself.
    """

    host: str
    port: int
    behind: RelayTarget | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.host.strip("[]"), self.port

    def __str__(self) -> str:
        place = f"{self.host}:{self.port}"
        return place if self.behind is None else f"{place}/{self.behind.rank}/{self.behind.door}"


@dataclass(frozen=True)
class IslandAddress:
    """The routes to one rank for calls or for payloads, in the order in which to try them."""

    key: str
    """Public key of the island, which the answering side must prove."""
    routes: tuple[Route, ...]

    def __str__(self) -> str:
        return f"{SCHEME}{self.key}@{';'.join(map(str, self.routes))}"


def parse_island_address(text: str) -> IslandAddress:
    """Parse an address from a peer's record. Raises MessageError if it is malformed."""
    found = _ADDRESS.fullmatch(text)
    words = found[2].split(";") if found else []
    if found is None or len(words) > MAX_ROUTES:
        raise MessageError(f"a malformed address: {text[:80]!r}")
    return IslandAddress(found[1], tuple(map(parse_route, words)))


def parse_route(text: str) -> Route:
    """Parse `host:port` or `host:port/rank/door`. Raises MessageError."""
    found = _ROUTE.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65536:
        raise MessageError(f"a malformed address: {text[:80]!r}")
    behind = (
        RelayTarget(int(found[3]), "calls" if found[4] == "calls" else "payloads")
        if found[3]
        else None
    )
    return Route(found[1], int(found[2]), behind)


def is_loopback(host: str) -> bool:
    """Return whether the host is a loopback address, which can be reached only from this
    machine.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_key(address: str) -> str:
    """Return the island key in an address, or "" if it has none, like the address of a
    rendezvous.
    """
    found = _ADDRESS.fullmatch(address)
    return found[1] if found else ""


def parse_relays(texts: Sequence[str]) -> tuple[Route, ...]:
    """Parse the relays in `island.relays`. Raises InputError."""
    relays = []
    for text in texts:
        try:
            relay = parse_route(text)
        except MessageError:
            relay = None
        if relay is None or relay.behind is not None or relay.host in WILDCARDS:
            raise InputError(
                f"island.relays: got {text!r}; allowed: HOST:PORT, as `diloco relay` prints it"
            )
        relays.append(relay)
    if len(relays) >= MAX_ROUTES:
        raise InputError(
            f"island.relays: got {len(relays)}; at most {MAX_ROUTES - 1} are allowed, and two are "
            "enough"
        )
    return tuple(dict.fromkeys(relays))
