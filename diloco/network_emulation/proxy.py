"""A proxy for tests that speaks HTTP CONNECT and SOCKS 5, as at the edge of a closed cluster.

    python -m diloco.network_emulation.proxy HOST PORT [USER:PASSWORD]

Prints its port (0: any), and then each destination that it connects to.
"""

import asyncio
import base64
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

ASK_SECONDS = 10.0
"""Longest time that a client may take to name its destination."""


async def serve(reader: StreamReader, writer: StreamWriter, login: str) -> None:
    """Serve one connection until both ends have closed it."""
    with suppress(OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError):
        async with asyncio.timeout(ASK_SECONDS):
            first = await reader.readexactly(1)
            host, port = await (socks if first == b"\x05" else http)(reader, writer, login)
        if host:
            await pass_on(reader, writer, host, port, is_socks=first == b"\x05")
    writer.close()


async def pass_on(
    reader: StreamReader, writer: StreamWriter, host: str, port: int, *, is_socks: bool
) -> None:
    """Connect to the destination and copy bytes both ways."""
    say(f"{host}:{port}")
    try:
        onward = await asyncio.open_connection(host, port)
    except OSError:
        writer.write(
            b"\x05\x05\x00\x01" + bytes(6) if is_socks else b"HTTP/1.1 502 Bad Gateway\r\n\r\n"
        )
        return
    writer.write(
        b"\x05\x00\x00\x01" + bytes(6)
        if is_socks
        else b"HTTP/1.1 200 Connection established\r\n\r\n"
    )
    await asyncio.gather(copy(reader, onward[1]), copy(onward[0], writer))


async def http(reader: StreamReader, writer: StreamWriter, login: str) -> tuple[str, int]:
    """Return the destination of a CONNECT request whose first letter has been read.

    The host is empty if the request is refused.
    """
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    wanted = f"Proxy-Authorization: Basic {base64.b64encode(login.encode()).decode()}"
    if login and wanted not in lines:
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
        return "", 0
    host, _, port = lines[0].split()[1].rpartition(":")
    return host, int(port)


async def socks(reader: StreamReader, writer: StreamWriter, login: str) -> tuple[str, int]:
    """Return the destination that a SOCKS client requests by name.

    The host is empty if it is refused.
    """
    methods = await reader.readexactly((await reader.readexactly(1))[0])
    wanted = 2 if login else 0
    writer.write(bytes([5, wanted if wanted in methods else 255]))
    if wanted not in methods:
        return "", 0
    if login:
        await reader.readexactly(1)
        words = [
            (await reader.readexactly((await reader.readexactly(1))[0])).decode() for _ in range(2)
        ]
        writer.write(bytes([1, ":".join(words) != login]))
        if ":".join(words) != login:
            return "", 0
    await reader.readexactly(4)
    host = await reader.readexactly((await reader.readexactly(1))[0])
    return host.decode(), int.from_bytes(await reader.readexactly(2))


async def copy(reader: StreamReader, writer: StreamWriter) -> None:
    """Copy until one end closes."""
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(host: str, port: int, login: str) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: serve(reader, writer, login), host, port
    )
    say(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))
