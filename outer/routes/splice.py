"""Forwards the bytes between two connections, with a fixed buffer for each direction and a limit of their rate."""

import asyncio
import socket
from contextlib import suppress

from outer.network.event_loop import loop_time

BUFFER_BYTES = 1 << 16
"""For each direction. What does not fit waits at the sender, as TCP has it."""
LINGER_SECONDS = 30.0
"""When one end has said that it sends nothing more, the other one has this time to end, too."""
BURST_SECONDS = 0.25
"""A meter lets through so much at once, after a pause."""


class Meter:
    """Limits the bytes per second of all that share it. None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self.num_bytes = 0
        """Bytes so far."""
        self._free_at = float("-inf")

    async def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may pass."""
        self.num_bytes += num_bytes
        if self._bytes_per_second is None:
            return
        now = loop_time()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + num_bytes / self._bytes_per_second
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


async def splice(one: socket.socket, other: socket.socket, meter: Meter) -> None:
    """Forward bytes both ways until both ends have ended or one of them fails. The caller closes the connections."""
    ways = {asyncio.create_task(_forward(one, other, meter)), asyncio.create_task(_forward(other, one, meter))}
    try:
        done, open_ways = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if open_ways and all(way.exception() is None for way in done):
            await asyncio.wait(open_ways, timeout=LINGER_SECONDS)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _forward(source: socket.socket, to: socket.socket, meter: Meter) -> None:
    """Forward bytes one way until the source sends nothing more, and say so. Raises OSError."""
    loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(BUFFER_BYTES))
    while num_bytes := await loop.sock_recv_into(source, buffer):
        await meter.take(num_bytes)
        await loop.sock_sendall(to, buffer[:num_bytes])
    with suppress(OSError):  # it may have ended, too
        to.shutdown(socket.SHUT_WR)
