"""Rendezvous for tests, and memberships of islands at them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from outer.membership.rendezvous import Rendezvous, serve_rendezvous
from outer.membership.tcp import TcpMembership, open_membership
from outer.network.endpoints import Endpoint
from outer.network.run_key import PeerAuth
from tests.outer.nets import key_of


@contextmanager
def rendezvous(count: int) -> Iterator[list[Rendezvous]]:
    """Start several rendezvous in this process."""
    served = [serve_rendezvous("127.0.0.1", 0) for _ in range(count)]
    try:
        yield served
    finally:
        for one in served:
            one.close()


@asynccontextmanager
async def open_memberships(
    *members: tuple[str, list[str]], run_id: str = "run"
) -> AsyncIterator[list[TcpMembership]]:
    """Open memberships of these islands at these addresses."""
    found: list[TcpMembership] = []
    try:
        for island, addresses in members:
            auth = PeerAuth(island=key_of(island))
            found.append(
                await open_membership(addresses, run_id, Endpoint(island, 0), 1.5, 10, auth)
            )
        yield found
    finally:
        for membership in found:
            await membership.close()
