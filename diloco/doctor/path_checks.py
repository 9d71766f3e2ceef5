"""Checks of `diloco doctor` on the ports and paths for payloads: the route that leads to each
rank.
"""

from collections.abc import AsyncIterator, Sequence

from diloco.doctor.address_checks import time_connection
from diloco.doctor.checks import Check
from diloco.swarm.visit import LocalIsland
from outer.errors import MessageError, PeerLost, TransportError, first_line
from outer.membership.base import Member
from outer.network.endpoints import Endpoint
from outer.routes.addresses import Door, IslandAddress, Route, parse_island_address
from outer.routes.dialer import Dialer
from outer.routes.proxy import parse_proxy

MAX_RANKS = 64
"""Most ranks of one island that are checked. Its record may claim more, but is not trusted."""
CURE_OF_GLOO = (
    "gloo chooses its own ports: let islands reach each other on all ports, or use tls or hivemind"
)
CURE_OF_TLS = (
    "open these ports on that machine and set island.announce_host to the address that others see; "
    "or, where no port can be opened, set island.relays there to a `diloco relay` that both reach"
)


async def check_gloo_ports(member: Member) -> Check:
    """Check that each rank accepts connections on the port where groups are built."""
    from outer.transports.gloo.groups import parse_address

    addresses = member.transport_addresses[:MAX_RANKS]
    for rank, address in enumerate(addresses):
        try:
            host, port = parse_address(Endpoint(member.island, rank), address)
        except PeerLost as error:
            return Check("FAILED", "payload ports", f"rank {rank}: {error.cause}")
        _, problem = await time_connection(host, port)
        if problem:
            return Check(
                "FAILED", "payload ports", f"rank {rank}, {host}:{port}: {problem}; {CURE_OF_GLOO}"
            )
    return Check(
        "ok",
        "payload ports",
        f"{len(addresses)} of {len(addresses)} ranks accept connections for gloo",
    )


async def check_paths(member: Member, local: LocalIsland) -> AsyncIterator[Check]:
    """Check the route to each rank, for calls and for payloads.

    Each result names the first route that leads to the rank, and why those before it do not.
    """
    doors: dict[Door, Sequence[str]] = {
        "calls": member.control_addresses,
        "payloads": member.transport_addresses,
    }
    dialer = Dialer(parse_proxy(local.island.proxy))
    for door, addresses in doors.items():
        for rank, text in enumerate(addresses[:MAX_RANKS]):
            try:
                check = await check_path(
                    dialer, f"rank {rank}", f"path of {door}", parse_island_address(text)
                )
            except MessageError as error:
                check = Check("FAILED", f"path of {door}", f"rank {rank}: its record holds {error}")
            yield check


async def check_path(dialer: Dialer, who: str, name: str, address: IslandAddress) -> Check:
    """Check that a route leads to the rank; name that route, and why those before it do not."""
    route, failed = await find_route(dialer, address)
    if route is None:
        return Check("FAILED", name, f"{who}: no route. {'; '.join(failed)}; {CURE_OF_TLS}")
    why = f", because {'; '.join(failed)}" if failed else ""
    if not failed and route.behind is not None:
        why = ", because its record lists no direct address (island.announce_host)"
    return Check("ok", name, f"{who}: {describe_route(route)}{why}")


async def find_route(dialer: Dialer, address: IslandAddress) -> tuple[Route | None, list[str]]:
    """Return the first route of an address that leads to the rank, or None.

    And why others before failed.
    """
    failed: list[str] = []
    for route in address.routes:
        try:
            connection = await dialer.dial_route(address.key, route)
        except (OSError, TransportError) as error:
            failed.append(f"{describe_route(route)}: {first_line(error)}")
            continue
        connection.close()
        return route, failed
    return None, failed


def describe_route(route: Route) -> str:
    """Describe a route in words."""
    way = "direct" if route.behind is None else "by the relay"
    return f"{way} {route.host}:{route.port}"
