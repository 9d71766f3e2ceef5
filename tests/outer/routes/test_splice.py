"""What a relay forwards: all bytes, no faster than its limit, and no more of them in memory than
its buffers.
"""

import asyncio
import socket
import time

from outer.routes.splice import BURST_SECONDS, Meter, splice
from tests.outer.nets import run


async def pairs() -> tuple[socket.socket, socket.socket, socket.socket, socket.socket]:
    """Two connections: the outer ends for the test, the inner ends for the relay."""
    (a, one), (two, b) = socket.socketpair(), socket.socketpair()
    for each in (a, one, two, b):
        each.setblocking(False)
    return a, one, two, b


def test_all_bytes_pass_both_ways_and_an_end_is_passed_on():
    async def main() -> None:
        loop, (a, one, two, b) = asyncio.get_running_loop(), await pairs()
        meter = Meter(None)
        work = asyncio.create_task(splice(one, two, meter))
        sent = bytes(range(256)) * 4000
        sending = asyncio.create_task(loop.sock_sendall(a, sent))
        got = bytearray()
        while len(got) < len(sent):
            got += await loop.sock_recv(b, 1 << 16)
        await sending
        assert got == sent and meter.num_bytes == len(sent)
        a.shutdown(socket.SHUT_WR)
        assert await loop.sock_recv(b, 1) == b""
        await loop.sock_sendall(b, b"last words")
        assert await loop.sock_recv(a, 99) == b"last words"
        b.close()
        await asyncio.wait_for(work, 5)
        for each in (a, one, two):
            each.close()

    run(main())


def test_an_end_that_takes_nothing_stops_the_other_one():
    async def main() -> None:
        loop, (a, one, two, b) = asyncio.get_running_loop(), await pairs()
        meter = Meter(None)
        work = asyncio.create_task(splice(one, two, meter))
        sending = asyncio.create_task(loop.sock_sendall(a, bytes(64 << 20)))
        seen = -1
        while seen != meter.num_bytes:
            seen = meter.num_bytes
            await asyncio.sleep(0.2)
        assert 0 < seen < 4 << 20 and not sending.done()
        for task in (work, sending):
            task.cancel()
        await asyncio.gather(work, sending, return_exceptions=True)
        for each in (a, one, two, b):
            each.close()

    run(main())


def test_a_meter_holds_all_that_share_it_to_one_rate():
    async def main() -> None:
        meter, began = Meter(1e6), time.monotonic()
        await asyncio.gather(*(meter.take(50_000) for _ in range(16)))
        assert time.monotonic() - began >= 0.8 - BURST_SECONDS - 0.05

    run(main())
