"""Frames on a byte stream between islands: a fixed header, then a payload. Every field is checked on arrival.

    magic 4 | version 1 | kind 1 | run 8 | rank 2 | round 4 | attempt 4 | phase 1 | part 4 | request 8 | length 8

`run` is a hash of the run's id and the stream's purpose, so that two runs never mix. The first frame of a stream
is a HELLO: the dialer's name and the group (an epoch of participants) that everything on this stream belongs to.
"""

import asyncio
import hashlib
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

import torch

from outer.errors import MessageError
from outer.transports.base import Endpoint, Phase, Tag, Traffic

MAGIC = b"DLCO"
VERSION = 1
_HEADER = struct.Struct("!4sBB8sHIIBIQQ")
HEADER_BYTES = _HEADER.size
PIECE_BYTES = 1 << 18
"""Written or read at once: large enough to be cheap, small enough to share the loop."""
MAX_HELLO_BYTES = 512


NO_TAG = Tag(0, 0, Phase.REDUCE, 0)


class Kind(IntEnum):
    """What a frame holds."""

    HELLO = 0  # the dialer's island, a newline, its group, as UTF-8; the rank is in the header
    PAYLOAD = 1
    CALL = 2
    REPLY = 3
    REFUSAL = 4  # the text of an error, as UTF-8


@dataclass(frozen=True)
class Header:
    """A frame's header. `tag` matters in PAYLOAD, `request` in CALL, REPLY and REFUSAL."""

    kind: Kind
    rank: int = 0
    tag: Tag = NO_TAG
    request: int = 0
    num_bytes: int = 0


def hash_of(*names: str) -> bytes:
    """8 bytes that stand for these names in a header."""
    return hashlib.sha256("\0".join(names).encode()).digest()[:8]


def pack_header(header: Header, run: bytes) -> bytes:
    """The header as HEADER_BYTES bytes."""
    tag = header.tag
    position = (tag.round, tag.attempt, tag.phase, tag.part)
    return _HEADER.pack(MAGIC, VERSION, header.kind, run, header.rank, *position, header.request, header.num_bytes)


def parse_header(raw: bytes, run: bytes, max_bytes: int) -> Header:
    """The header in `raw`. Raises MessageError unless it is sound, of this run, and announces <= `max_bytes`."""
    if len(raw) != HEADER_BYTES:
        raise MessageError(f"a frame's header of {len(raw)} bytes, {HEADER_BYTES} expected")
    magic, version, kind, its_run, rank, round_number, attempt, phase, part, request, length = _HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise MessageError(f"not a frame of version {VERSION}: it begins with {raw[:5].hex()}")
    if its_run != run:
        raise MessageError("a frame of another run")
    if length > max_bytes:
        raise MessageError(f"a frame of {length} bytes, at most {max_bytes} are allowed")
    try:
        return Header(Kind(kind), rank, Tag(round_number, attempt, Phase(phase), part), request, length)
    except ValueError as error:
        raise MessageError(f"a frame with an unknown code: {error}") from None


class FrameStream:
    """Frames over one connection, its bytes counted. One task reads; any number may write."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, run: bytes, traffic: Traffic
    ) -> None:
        self._reader, self._writer, self._run, self._traffic = reader, writer, run, traffic
        self._write_lock = asyncio.Lock()
        # A drain then waits until the kernel has all of it, so that a payload's buffer may be reused.
        writer.transport.set_write_buffer_limits(high=0)

    async def write(self, header: Header, payload: memoryview | bytes) -> None:
        """Send one frame; returns when `payload` has left this process. Raises ConnectionError.

        Cancelled in the middle it leaves half a frame behind: close the stream then.
        """
        assert header.num_bytes == len(payload), "a header must announce its payload's length"
        view = memoryview(payload)
        async with self._write_lock:
            await self._write_bytes(pack_header(header, self._run))
            for start in range(0, len(view), PIECE_BYTES):
                await self._write_bytes(view[start : start + PIECE_BYTES])

    async def read(self, max_bytes: int) -> tuple[Header, torch.Tensor]:
        """The next frame, its payload as 1-D uint8. Raises ConnectionError at its end, MessageError when malformed."""
        header = await self.read_header(max_bytes)
        payload = torch.empty(header.num_bytes, dtype=torch.uint8)
        view = view_of(payload)
        filled = 0
        while filled < header.num_bytes:
            piece = await self._reader.read(min(PIECE_BYTES, header.num_bytes - filled))
            if not piece:
                raise ConnectionResetError("the connection ended within a frame")
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._traffic.bytes_received += len(piece)
        return header, payload

    async def read_header(self, max_bytes: int) -> Header:
        """The next frame's header alone; its payload stays unread."""
        try:
            raw = await self._reader.readexactly(HEADER_BYTES)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the connection was closed" if not error.partial else "cut off") from None
        self._traffic.bytes_received += HEADER_BYTES
        return parse_header(raw, self._run, max_bytes)

    async def say_hello(self, me: Endpoint, group: str = "") -> None:
        """Send the first frame: who dials, and the group that this stream belongs to."""
        text = f"{me.island}\n{group}".encode()
        await self.write(Header(Kind.HELLO, me.rank, num_bytes=len(text)), text)

    async def read_hello(self) -> tuple[Endpoint, str]:
        """Who the dialer claims to be, and its group. Raises MessageError when the first frame is not a hello."""
        header, payload = await self.read(MAX_HELLO_BYTES)
        if header.kind is not Kind.HELLO:
            raise MessageError(f"a stream that begins with {header.kind.name}, HELLO expected")
        island, _, group = text_of(payload).partition("\n")
        return Endpoint(island, header.rank), group

    def close(self) -> None:
        """Drop the connection; what is unsent is lost. Idempotent."""
        with suppress(RuntimeError):  # the event loop may have been closed already
            self._writer.transport.abort()

    async def _write_bytes(self, data: memoryview | bytes) -> None:
        if self._writer.transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._writer.write(data)
        await self._writer.drain()
        self._traffic.bytes_sent += len(data)


def checked(payload: torch.Tensor) -> torch.Tensor:
    """The payload itself. Raises ValueError unless it is a contiguous 1-D uint8 CPU tensor."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise ValueError(f"a payload is 1-D contiguous uint8, got {payload.dtype} of shape {tuple(payload.shape)}")
    return payload


def view_of(payload: torch.Tensor) -> memoryview:
    """The bytes of a payload, not copied."""
    return memoryview(checked(payload).numpy())  # pyright: ignore[reportArgumentType]


def text_of(payload: torch.Tensor) -> str:
    """A payload as text. Raises MessageError when it is not UTF-8."""
    try:
        return bytes(view_of(payload)).decode()
    except UnicodeDecodeError:
        raise MessageError("a text that is not UTF-8") from None
