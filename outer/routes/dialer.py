"""Connections to islands by the routes in their addresses: directly if possible, otherwise
through a relay.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from outer.errors import PeerLost, TransportError, first_line
from outer.network.event_loop import loop_time
from outer.routes import wire
from outer.routes.addresses import SCHEME, IslandAddress, Route, parse_island_address, parse_route
from outer.routes.proxy import Proxy
from outer.routes.sockets import connect_to

ROUTE_SECONDS = 5.0
"""Longest time to connect through one route."""
STAGGER_SECONDS = 0.5
"""The next route is tried in parallel after this time, or at once if the first one fails (RFC
8305)."""
AVOID_SECONDS = 30.0
"""For this time, a route that has failed is tried after the other routes."""
MAX_REMEMBERED = 1024
"""Limit for the routes and addresses that are remembered, because peers can name any number of
them."""


class Dialer:
    """Opens connections to other islands. `proxy`: the proxy through which this island connects,
    if there is one.
    """

    def __init__(self, proxy: Proxy | None = None) -> None:
        self._proxy = proxy
        self._failed_at: dict[Route, float] = {}
        self._used: dict[str, Route] = {}
        """The route by which each address was last reached."""

    async def open_streams(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to an island's address for calls, or to a plain `host:port`. Raises PeerLost."""
        try:
            if address.startswith(SCHEME):
                connection = await self.dial(parse_island_address(address))
            else:
                connection = await self.connect(parse_route(address))
            return await asyncio.open_connection(sock=connection)
        except (OSError, TransportError) as error:
            raise PeerLost(address[:80], f"it cannot be reached: {first_line(error)}") from None

    async def dial(self, address: IslandAddress) -> socket.socket:
        """Return the first connection that succeeds over one of the routes. TLS must still prove
        the other side's key.

        Raises ConnectionError, which names every route and its failure.
        """
        waiting = deque(self._order(address.routes))
        causes = list[str]()
        racing: dict[asyncio.Task[socket.socket], Route] = {}
        try:
            while waiting or racing:
                if waiting:
                    route = waiting.popleft()
                    racing[asyncio.create_task(self.dial_route(address.key, route))] = route
                limit = STAGGER_SECONDS if waiting else None
                done, _ = await asyncio.wait(
                    racing, timeout=limit, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    route = racing.pop(task)
                    if (error := task.exception()) is None:
                        self._used[str(address)] = route
                        _trim(self._used)
                        return task.result()
                    causes.append(
                        f"{route}: {first_line(error)}"
                        if len(address.routes) > 1
                        else first_line(error)
                    )
            raise ConnectionRefusedError("; ".join(causes))
        finally:
            for task in racing:
                task.cancel()
                task.add_done_callback(_close_unwanted)

    def blame(self, address: str) -> None:
        """Note that the endpoint reached at this address was not the island, or did not answer:
        try its other routes first.
        """
        if (route := self._used.pop(address, None)) is not None:
            self._note_failure(route)

    async def dial_route(self, key: str, route: Route) -> socket.socket:
        """Connect by one route to the island with this key. Raises OSError and MessageError."""
        try:
            async with asyncio.timeout(ROUTE_SECONDS):
                connection = await self.connect(route)
                try:
                    if (behind := route.behind) is not None:
                        await wire.send(
                            connection, wire.Dial(key=key, rank=behind.rank, door=behind.door)
                        )
                        await wire.receive(connection, wire.Joined)
                except BaseException:
                    connection.close()
                    raise
        except (OSError, TransportError) as error:
            self._note_failure(route)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no answer within {ROUTE_SECONDS:g} s") from None
            raise
        self._failed_at.pop(route, None)
        return connection

    async def connect(self, route: Route) -> socket.socket:
        """Connect to the route's host and port, through the proxy if there is one. Raises
        OSError.
        """
        host, port = route.place
        if self._proxy is None:
            return await connect_to(host, port)
        connection = await connect_to(self._proxy.host, self._proxy.port)
        try:
            await self._proxy.ask(connection, host, port)
        except BaseException:
            connection.close()
            raise
        return connection

    def _order(self, routes: Sequence[Route]) -> list[Route]:
        """Return the routes in the order of the address, but with recently failed routes last."""
        since = loop_time() - AVOID_SECONDS
        return sorted(routes, key=lambda route: self._failed_at.get(route, since) > since)

    def _note_failure(self, route: Route) -> None:
        self._failed_at[route] = loop_time()
        _trim(self._failed_at)


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to `host:port`. Raises PeerLost."""
    return await Dialer().open_streams(address)


def _trim(remembered: dict[Any, Any]) -> None:
    while len(remembered) > MAX_REMEMBERED:
        del remembered[next(iter(remembered))]


def _close_unwanted(task: "asyncio.Task[socket.socket]") -> None:
    """Close the connection of a route that was slower than another one."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()
