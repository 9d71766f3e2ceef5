"""Addresses of endpoints over TLS: the address that a rank announces, and checks of addresses in
others' records.
"""

from collections.abc import Sequence

from outer.errors import InputError, MessageError, PeerLost
from outer.network.endpoints import Endpoint
from outer.routes.addresses import (
    WILDCARDS,
    Door,
    IslandAddress,
    RelayTarget,
    Route,
    is_loopback,
    parse_island_address,
)


def parse_address(endpoint: Endpoint, text: str) -> IslandAddress:
    """Parse the address in a peer's record. Raises PeerLost if it is malformed, since the peer
    cannot be reached.
    """
    try:
        return parse_island_address(text)
    except MessageError:
        cause = f"its record holds a malformed address of {endpoint}: {text[:80]!r}"
        raise PeerLost(endpoint.island, cause) from None


def choose_announced_host(
    listen_host: str, announce_host: str | None, relays: Sequence[Route] = ()
) -> str | None:
    """Return the host to announce, or None if other islands reach this machine only through
    `relays`.

    Raises InputError if there is neither.
    """
    if announce_host is not None:
        return announce_host
    if relays and (listen_host in WILDCARDS or is_loopback(listen_host)):
        return None
    if listen_host in WILDCARDS:
        raise InputError(
            f"island.announce_host: got none, and island.listen_host is {listen_host!r}; with "
            "outer.transport tls set island.announce_host to the address of this machine, or of "
            "its router, that the other islands reach; or, if they reach none, island.relays"
        )
    return listen_host


def build_address(
    key: str, host: str | None, port: int, relays: Sequence[Route], rank: int, door: Door
) -> str:
    """Return the address of one door of a rank: `host` and `port`, if others can reach them, and
    then the relays.
    """
    direct = () if host is None else (Route(host, port),)
    return str(
        IslandAddress(
            key,
            (
                *direct,
                *(Route(relay.host, relay.port, RelayTarget(rank, door)) for relay in relays),
            ),
        )
    )
