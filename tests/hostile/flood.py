"""A stranger that opens many connections."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def connections(port: int, number: int) -> Iterator[list[socket.socket]]:
    """Open as many connections as are taken, up to `number`, and say nothing on them."""
    with ExitStack() as stack:
        opened = []
        for _ in range(number):
            try:
                link = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            except OSError:
                continue
            opened.append(link)
        yield opened
