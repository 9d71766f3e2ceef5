"""A proxy that speaks HTTP CONNECT and SOCKS 5: python -m tests.outer.routes.proxy_process [USER:PASSWORD].

Prints its port, and then each place that it connects to.
"""

import asyncio
import base64
import sys
from asyncio import StreamReader, StreamWriter


async def serve(reader: StreamReader, writer: StreamWriter, login: str) -> None:
    first = await reader.readexactly(1)
    host, port = await (socks if first == b"\x05" else http)(reader, writer, login)
    if not host:
        writer.close()
        return
    print(f"{host}:{port}", flush=True)
    try:
        onward = await asyncio.open_connection(host, port)
    except OSError:
        writer.write(b"\x05\x05\x00\x01" + bytes(6) if first == b"\x05" else b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
        writer.close()
        return
    writer.write(b"\x05\x00\x00\x01" + bytes(6) if first == b"\x05" else b"HTTP/1.1 200 Connection established\r\n\r\n")
    await asyncio.gather(copy(reader, onward[1]), copy(onward[0], writer))


async def http(reader: StreamReader, writer: StreamWriter, login: str) -> tuple[str, int]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    wanted = f"Proxy-Authorization: Basic {base64.b64encode(login.encode()).decode()}"
    if login and wanted not in lines:
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
        return "", 0
    host, _, port = lines[0].split()[1].rpartition(":")  # the first letter of CONNECT has been read
    return host, int(port)


async def socks(reader: StreamReader, writer: StreamWriter, login: str) -> tuple[str, int]:
    methods = await reader.readexactly((await reader.readexactly(1))[0])
    wanted = 2 if login else 0
    writer.write(bytes([5, wanted if wanted in methods else 255]))
    if wanted not in methods:
        return "", 0
    if login:
        await reader.readexactly(1)
        words = [(await reader.readexactly((await reader.readexactly(1))[0])).decode() for _ in range(2)]
        writer.write(bytes([1, ":".join(words) != login]))
        if ":".join(words) != login:
            return "", 0
    await reader.readexactly(4)
    host = await reader.readexactly((await reader.readexactly(1))[0])
    return host.decode(), int.from_bytes(await reader.readexactly(2))


async def copy(reader: StreamReader, writer: StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.close()


async def main() -> None:
    login = sys.argv[1] if len(sys.argv) > 1 else ""
    server = await asyncio.start_server(lambda r, w: serve(r, w, login), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
