"""Connections through a proxy, for a cluster that allows no other outgoing ones: HTTP CONNECT,
or SOCKS 5 (RFC 1928, 1929).
"""

import asyncio
import base64
import socket
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from outer.errors import InputError
from outer.network.rejections import printable
from outer.routes.sockets import read_exactly

MAX_ANSWER_BYTES = 1 << 14
SOCKS_ERRORS = {
    1: "it failed", 2: "its rules forbid it", 3: "no route to that "
                                                 "network", 4: "no route to that host",
    5: "that host refuses", 6: "it took too long", 7: "it knows no CONNECT", 8: "it does not know "
                                                                                "this address",
}  # fmt: skip


@dataclass(frozen=True)
class Proxy:
    """A proxy, with a user name and a password, which may be empty."""

    kind: Literal["http", "socks5"]
    host: str
    port: int
    user: str = ""
    password: str = ""

    async def ask(self, connection: socket.socket, host: str, port: int) -> None:
        """Request that the proxy connects to a host and port. `connection` leads to the proxy.
        Raises ConnectionError.
        """
        try:
            await (self._ask_http if self.kind == "http" else self._ask_socks)(
                connection, host, port
            )
        except ConnectionError as error:
            raise ConnectionRefusedError(f"the proxy {self.host}:{self.port}: {error}") from None

    async def _ask_http(self, connection: socket.socket, host: str, port: int) -> None:
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
        if self.user:
            word = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {word}")
        await _send(connection, "\r\n".join([*lines, "", ""]).encode())
        answer = bytearray()
        while not answer.endswith(
            b"\r\n\r\n"
        ):  # One byte at a time, because the island's bytes follow.
            if len(answer) > MAX_ANSWER_BYTES:
                raise ConnectionResetError("its answer has no end")
            answer += await read_exactly(connection, 1)
        first = bytes(answer).split(b"\r\n", 1)[0].decode("latin-1")
        if first.split()[1:2] != ["200"]:
            raise ConnectionRefusedError(f"it answers {printable(first, 100)!r}")

    async def _ask_socks(self, connection: socket.socket, host: str, port: int) -> None:
        await _send(connection, b"\x05\x01\x02" if self.user else b"\x05\x01\x00")
        if await read_exactly(connection, 2) != (b"\x05\x02" if self.user else b"\x05\x00"):
            raise ConnectionRefusedError(
                "it is not a SOCKS 5 proxy, or it requires a user name and password"
            )
        if self.user:
            await _send(connection, b"\x01" + _counted(self.user) + _counted(self.password))
            if (await read_exactly(connection, 2))[1]:
                raise ConnectionRefusedError("it does not accept the name and password")
        # The proxy resolves the host name, which this machine may not be able to resolve.
        await _send(connection, b"\x05\x01\x00\x03" + _counted(host) + port.to_bytes(2))
        version, status, _, kind = await read_exactly(connection, 4)
        if version != 5 or status:
            raise ConnectionRefusedError(SOCKS_ERRORS.get(status, f"error {status}"))
        length = {1: 4, 4: 16}.get(kind) or (await read_exactly(connection, 1))[0]
        await read_exactly(connection, length + 2)


def parse_proxy(text: str | None) -> Proxy | None:
    """Parse `island.proxy`. Raises InputError."""
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        host = parts.hostname
        port = parts.port
    except ValueError:
        parts = urlsplit("")
        host = None
        port = None
    if parts.scheme not in ("http", "socks5") or not host or not port or parts.path.strip("/"):
        raise InputError(
            f"island.proxy: got {_hidden(text)!r}; allowed: http://[USER:PASSWORD@]HOST:PORT "
            "(CONNECT) or socks5://[USER:PASSWORD@]HOST:PORT"
        )
    user = unquote(parts.username or "")
    password = unquote(parts.password or "")
    if max(len(user.encode()), len(password.encode())) > 255:
        raise InputError("island.proxy: the name and the password have at most 255 bytes each")
    return Proxy("http" if parts.scheme == "http" else "socks5", host, port, user, password)


def _hidden(text: str) -> str:
    """Return the text without the part that may be a password."""
    return text.rpartition("@")[2]


def _counted(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 255:
        raise ConnectionRefusedError(f"the name has {len(raw)} bytes, SOCKS allows 255")
    return len(raw).to_bytes() + raw


async def _send(connection: socket.socket, raw: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, raw)
