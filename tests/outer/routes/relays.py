"""Helpers for tests of relays: relays on the test's event loop, and raw connections to them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outer.network.messages import Message
from outer.network.run_key import RunKey
from outer.routes import wire
from outer.routes.relay import Relay, RelayLimits


@asynccontextmanager
async def relays(
    count: int = 1, limits: RelayLimits | None = None, **own: Any
) -> AsyncIterator[list[Relay]]:
    """Open relays on loopback and close them at the end."""
    opened = [Relay(limits or RelayLimits(), **own) for _ in range(count)]
    for relay in opened:
        await relay.open("127.0.0.1", 0)
    try:
        yield opened
    finally:
        for relay in opened:
            await relay.close()


def addresses(opened: list[Relay]) -> list[str]:
    return [f"127.0.0.1:{relay.port}" for relay in opened]


async def connected(relay: Relay) -> socket.socket:
    """A connection to a relay, on which nothing has been said."""
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", relay.port))
    return connection


async def answered(relay: Relay, *said: Message | bytes) -> str:
    """The words with which a relay refuses what is said to it, or "" if it ends the connection
    without any.
    """
    connection = await connected(relay)
    try:
        for each in said:
            if isinstance(each, bytes):
                await asyncio.get_running_loop().sock_sendall(connection, each)
            else:
                await wire.send(connection, each)
        async with asyncio.timeout(10):
            while not isinstance(word := await wire.receive(connection, *wire.KINDS), wire.Refused):
                pass
        return word.text
    except ConnectionError:
        return ""
    finally:
        connection.close()


KEY = RunKey(b"k" * 32)
