"""TCP connections as plain asyncio sockets: opening, accepting, and reading an exact number of
bytes.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from outer.network.event_loop import Tasks

log = logging.getLogger(__name__)

KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}
"""Routers forget silent connections without notice to either end. The first three limits are in
seconds and a count, the last is in milliseconds."""
PAUSE_SECONDS = 1.0
"""Pause when no connection can be accepted, because too many files are open."""
BACKLOG = 512
"""Number of connections that may wait to be accepted."""


class Listener:
    """Accepts connections on a port, and serves each in a task of its own."""

    def __init__(self, serve: Callable[[socket.socket, str], Coroutine[Any, Any, None]]) -> None:
        """Create a listener. `serve(connection, host of the other end)` must close the
        connection or pass it on.
        """
        self._serve = serve
        self._socket = None
        self._tasks = Tasks()

    async def open(self, host: str, port: int) -> int:
        """Listen on a host and port (0: any free port), and return the port. Raises OSError."""
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, place = infos[0]
        self._socket = socket.create_server(place[:2], family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._tasks.start(self._accept_all(self._socket))
        return self._socket.getsockname()[1]

    def serve(self, connection: socket.socket) -> None:
        """Serve a connection that was not accepted on this port."""
        self._tasks.start(self._serve(connection, find_host(connection)))

    async def close(self) -> None:
        """Stop accepting, and cancel the tasks that serve connections. Idempotent."""
        await self._tasks.end()
        if self._socket is not None:
            self._socket.close()

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self.serve(prepare(connection))


async def connect_to(host: str, port: int) -> socket.socket:
    """Connect to the first of a host's addresses that accepts a connection. Raises OSError."""
    loop = asyncio.get_running_loop()
    cause = OSError("its host has no address")
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(str(error)) from None
    for family, _, _, _, target in found:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(connection)
            await loop.sock_connect(connection, target)
            return connection
        except OSError as error:
            connection.close()
            cause = error
        except BaseException:
            connection.close()
            raise
    raise cause


def prepare(connection: socket.socket) -> socket.socket:
    """Set options so that a connection ends when its other end is gone, routers keep it, and no
    bytes are delayed.
    """
    connection.setblocking(False)
    with suppress(OSError):  # it may have ended already
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # Linux has them all
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def find_host(connection: socket.socket) -> str:
    """Return the host of the other end, or of the relay or proxy in between."""
    try:
        return str(connection.getpeername()[0])
    except OSError:  # it has ended
        return "an ended connection"


async def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Read exactly `num_bytes` bytes. The caller limits the time. Raises OSError if the
    connection ends before.
    """
    loop = asyncio.get_running_loop()
    found = bytearray()
    while len(found) < num_bytes:
        piece = await loop.sock_recv(connection, num_bytes - len(found))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        found += piece
    return bytes(found)
