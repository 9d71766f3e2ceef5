"""Forwards the bytes between two connections, with a fixed buffer per direction and a rate
limit.
"""

import asyncio
import socket
from contextlib import suppress

from outer.network.event_loop import loop_time

BUFFER_BYTES = 1 << 16
"""Buffer size per direction. Bytes that do not fit wait at the sender, by TCP's flow control."""
LINGER_SECONDS = 30.0
"""After one end has closed its direction, the other end must close within this time."""
BURST_SECONDS = 0.25
"""After a pause, a meter lets pass at once the bytes of this time."""


class Meter:
    """Limits the bytes per second of all connections that share it. None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self.num_bytes = 0
        """Number of bytes so far."""
        self._free_at = float("-inf")

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may pass."""
        self.num_bytes += num_bytes
        if self._bytes_per_second is None:
            return
        now = loop_time()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + num_bytes / self._bytes_per_second
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


async def splice(one: socket.socket, other: socket.socket, meter: Meter) -> None:
    """Forward bytes both ways until both ends have ended or one of them fails. The caller closes
    the connections.
    """
    ways = {
        asyncio.create_task(_forward(one, other, meter)),
        asyncio.create_task(_forward(other, one, meter)),
    }
    try:
        done, open_ways = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if open_ways and all(way.exception() is None for way in done):
            await asyncio.wait(open_ways, timeout=LINGER_SECONDS)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _forward(source: socket.socket, to: socket.socket, meter: Meter) -> None:
    """Forward bytes in one direction until the source closes it, and then close it at the
    target. Raises OSError.
    """
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while num_bytes := await loop.sock_recv_into(source, buffer):
        await meter.take(num_bytes)
        await loop.sock_sendall(to, buffer[:num_bytes])
    with suppress(OSError):  # it may have ended, too
        to.shutdown(socket.SHUT_WR)
