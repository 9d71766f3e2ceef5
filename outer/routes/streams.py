"""asyncio streams for the connections of a messenger's calls."""

import asyncio
import socket

from outer.network.rpc import StreamMessenger


async def listen(
    messenger: StreamMessenger, host: str, port: int, announce_host: str | None = None
) -> StreamMessenger:
    """Serve the messenger on a host and port (0: any free port), and return it. Raises OSError."""
    messenger.server = await asyncio.start_server(messenger.accept, host, port)
    messenger.address = f"{announce_host or host}:{find_port(messenger)}"
    return messenger


def find_port(messenger: StreamMessenger) -> int:
    """Return the port on which a messenger listens."""
    assert messenger.server is not None, "`listen` comes first"
    return messenger.server.sockets[0].getsockname()[1]


def serve_connection(messenger: StreamMessenger, connection: socket.socket) -> None:
    """Serve a connection that was not accepted here, such as one from a relay. Must be called on
    the event loop.
    """
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), messenger.accept)
    serving = asyncio.create_task(
        asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
    )
    serving.add_done_callback(lambda done: done.cancelled() or done.exception())
