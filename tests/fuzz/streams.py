"""Streams whose other end says what an input holds."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from outer.network.endpoints import Traffic
from outer.network.frames import (
    HEADER_BYTES,
    FrameStream,
    Header,
    PeerIds,
    pack_header,
    parse_header,
    view_of,
)
from outer.network.run_key import FrameMacs
from tests.fuzz.loop import LOOP

RUN = b"\x07" * 8
Frame = tuple[Header, bytes]


class _Writer:
    """One connection of this machine, for all streams to write on. Nobody looks at what they
    write.
    """

    def __init__(self) -> None:
        self._open: asyncio.StreamWriter | None = None

    async def get(self) -> asyncio.StreamWriter:
        if self._open is None or self._open.transport.is_closing():
            ours, theirs = socket.socketpair()
            await LOOP.connect_accepted_socket(asyncio.Protocol, theirs)
            _, self._open = await asyncio.open_connection(sock=ours)
        return self._open


_WRITER = _Writer()


def on_stream(raw: bytes, work: Callable[[FrameStream], Awaitable[Any]]) -> Any:
    """The result of the work with a stream on which these bytes come, and then its end."""

    async def main() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        return await work(FrameStream(reader, await _WRITER.get(), RUN, Traffic()))

    return LOOP.run_until_complete(main())


def on_socket(raw: bytes, work: Callable[[socket.socket], Awaitable[Any]]) -> Any:
    """The result of the work with a socket on which these bytes come, and then its end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(raw)
        theirs.shutdown(socket.SHUT_WR)
        return LOOP.run_until_complete(work(ours))


class PeerStream:
    """A Stream (outer/network/handshake.py) whose other end answers each read by what was written
    before.
    """

    def __init__(self, answer: Callable[[list[Frame]], Iterator[Frame]]) -> None:
        """`answer` is given all frames that are written, and yields those that are read."""
        self.peer, self.peer_key, self.run, self.certificate = "peer", "", RUN, ""
        self.peer_ids: PeerIds | None = None
        self._written: list[Frame] = []
        self._answers = answer(self._written)

    async def write(self, header: Header, payload: memoryview | bytes) -> None:
        self._written.append((header, bytes(payload)))

    async def read(self, max_bytes: int) -> tuple[Header, torch.Tensor]:
        for header, payload in self._answers:
            parse_header(pack_header(replace(header, num_bytes=len(payload)), RUN), RUN, max_bytes)
            return header, torch.frombuffer(
                bytearray(payload), dtype=torch.uint8
            ) if payload else torch.empty(0).byte()
        raise ConnectionResetError("the peer has ended")

    async def finish(self) -> None:
        """The other end has heard all."""

    def close(self) -> None:
        """Nothing is open."""

    def use_macs(self, sent: FrameMacs, received: FrameMacs) -> None:
        """The handshake is over, and with it what is read here."""


def frames_in(raw: bytes, max_bytes: int) -> Iterator[bytes]:
    """Cut bytes into frames, each of which says how long it is; one that cannot be read is the
    last.
    """
    while raw:
        size = len(raw)
        with suppress(Exception):
            size = HEADER_BYTES + parse_header(raw[:HEADER_BYTES], RUN, max_bytes).num_bytes
        yield raw[:size]
        raw = raw[size:]


async def read_all(stream: FrameStream, max_bytes: int) -> list[Frame]:
    """The frames that come until the stream ends between two of them. Raises as
    `FrameStream.read`.
    """
    found: list[Frame] = []
    while True:
        try:
            header, payload = await stream.read(max_bytes)
        except ConnectionResetError as error:
            if type(error) is ConnectionResetError:
                return found
            raise
        found.append((header, bytes(view_of(payload))))
