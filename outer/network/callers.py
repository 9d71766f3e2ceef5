"""The origin of the call that a handler answers, and the addresses that lead back to that host
and to no other.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar

from outer.errors import MessageError

MAX_ROUTES = 8
RESOLVE_SECONDS = 5.0

FindHosts = Callable[[], Awaitable[Collection[str]]]
"""Function that returns the IP addresses of a caller's connections, as the kernel or the libp2p
daemon sees them. Behind a relay these are the relay's addresses."""
CALLERS_HOSTS: ContextVar[FindHosts | None] = ContextVar("CALLERS_HOSTS", default=None)
"""The function for the call that is being answered; None within one process."""


async def address_of_caller(address: str) -> str:
    """Return the address without routes to hosts other than the caller's. Raises MessageError if no
    route is left.

    A host name is resolved here, once, so that it cannot mean another host later, when it is
    dialled.
    """
    find_hosts = CALLERS_HOSTS.get()
    if find_hosts is None:
        return address
    hosts = {as_ip(host) for host in await find_hosts()}
    begin, at, places = address.rpartition("@")
    routes = [
        route for place in places.split(";")[:MAX_ROUTES] if (route := await route_to(hosts, place))
    ]
    if not routes:
        raise MessageError(
            f"only addresses of the calling host, {' or '.join(sorted(hosts))}, are called back, "
            f"got {places[:100]}"
        )
    return f"{begin}{at}{';'.join(routes)}"


async def route_to(hosts: Collection[str], place: str) -> str:
    """Return the place (`host:port` or a multiaddress) with its host as an IP address; empty
    unless the host is one of `hosts`.
    """
    if place.startswith("/"):
        _, kind, host, *rest = [*place.split("/"), "", ""]
        ip = await resolve(host, hosts)
        version = kind if host == ip else f"ip{ipaddress.ip_address(ip).version}" if ip else kind
        return "/".join(["", version, ip, *rest]).rstrip("/") if ip else ""
    direct, slash, by_relay = place.partition("/")
    host, _, port = direct.rpartition(":")
    ip = await resolve(host.strip("[]"), hosts)
    return f"{f'[{ip}]' if ':' in ip else ip}:{port}{slash}{by_relay}" if ip else ""


async def resolve(host: str, hosts: Collection[str]) -> str:
    """Return the address among `hosts` (IP addresses) to which `host` resolves or which it is;
    empty if there is none.
    """
    if is_ip(host):
        return as_ip(host) if as_ip(host) in hosts else ""
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except (OSError, UnicodeError, TimeoutError):
        return ""
    return next((as_ip(str(place[0])) for *_, place in found if as_ip(str(place[0])) in hosts), "")


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def as_ip(host: str) -> str:
    """Return an IP address in its usual form: an IPv4 address that an IPv6 socket has seen is
    written as IPv4. Other texts are returned unchanged.
    """
    if not is_ip(host):
        return host
    ip = ipaddress.ip_address(host)
    return str(getattr(ip, "ipv4_mapped", None) or ip)
