"""Frames on a byte stream between islands: a fixed header, then a payload. Every field is checked
on arrival.

    magic 4 | version 1 | kind 1 | run 8 | rank 2 | round 4 | attempt 4 |
    leg 1 | part 4 | request 8 | length 8

`run` is a hash of the run's id and the stream's purpose, so that two runs never mix. A stream
begins with the hello and handshake of outer/network/handshake.py. In a run with a key, and on plain
TCP, 16 bytes of MAC then follow each payload; under TLS there is no MAC.
"""

import asyncio
import hashlib
import hmac
import ssl
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from outer.errors import MessageError
from outer.identity.tls import hash_certificate
from outer.network.endpoints import Kind, Leg, Tag, Traffic
from outer.network.event_loop import loop_time
from outer.network.rejections import BODY_SECONDS, RefusedError, printable
from outer.network.run_key import MAC_BYTES, FrameMacs

MAGIC = b"DLCO"
VERSION = 12
_HEADER = struct.Struct("!4sBB8sHIIBIQQ")
HEADER_BYTES = _HEADER.size
COPIED_BYTES = 1 << 16  # a frame of up to this size is sent in one piece, by one system call
PIECE_BYTES = 1 << 18
"""Bytes written or read at once: enough to be cheap, few enough to share the event loop."""
MAX_HELLO_BYTES = 1024
"""Limit for every frame of a handshake, and for a refusal."""
NO_TAG = Tag(0, 0, Leg.REDUCE, 0)


@dataclass(frozen=True)
class Header:
    """A frame's header. `tag` is used in PAYLOAD frames, `request` in CALL, REPLY and REFUSAL
    frames.
    """

    kind: Kind
    rank: int = 0
    tag: Tag = NO_TAG
    request: int = 0
    num_bytes: int = 0


def hash_names(*names: str) -> bytes:
    """Hash names to the 8 bytes of a header's `run` field."""
    return hashlib.sha256("\0".join(names).encode()).digest()[:8]


def pack_header(header: Header, run: bytes) -> bytes:
    tag = header.tag
    position = (tag.round, tag.attempt, tag.leg, tag.part)
    return _HEADER.pack(
        MAGIC, VERSION, header.kind, run, header.rank, *position, header.request, header.num_bytes
    )


def parse_header(raw: bytes, run: bytes, max_bytes: int) -> Header:
    """Parse a header. Raises MessageError if it is malformed, of another run, or announces more
    than `max_bytes`.
    """
    if len(raw) != HEADER_BYTES:
        raise RefusedError(
            "header", f"a frame's header of {len(raw)} bytes, {HEADER_BYTES} expected"
        )
    magic, version, kind, its_run, rank, round_number, attempt, leg, part, request, length = (
        _HEADER.unpack(raw)
    )
    if magic != MAGIC:
        raise RefusedError("header", f"not a frame of diloco: it begins with {raw[:5].hex()}")
    if version != VERSION:
        cure = "install the same release of diloco on all islands"
        raise RefusedError(
            "version",
            f"a frame of version {version}, and this island speaks version {VERSION}: {cure}",
        )
    if its_run != run:
        raise RefusedError("run", "a frame of another run")
    if length > max_bytes:
        raise RefusedError("size", f"a frame of {length} bytes, at most {max_bytes} are allowed")
    try:
        return Header(Kind(kind), rank, Tag(round_number, attempt, Leg(leg), part), request, length)
    except ValueError as error:
        raise RefusedError("header", f"a frame with an unknown code: {error}") from None


@dataclass(frozen=True)
class PeerIds:
    """Ids of the libp2p peers at the two ends of a stream. libp2p has proved both ids and
    encrypts the stream.
    """

    own: str
    other: str


class CutOffError(ConnectionResetError):
    """The other side ended the connection in the middle of a frame."""


class FrameStream:
    """Reads and writes frames on one connection. One task reads; any number of tasks may write.
    After an error only `close` may be called.
    """

    def __init__(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        run: bytes,
        traffic: Traffic,
        peer_ids: PeerIds | None = None,
    ) -> None:
        name = writer.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else "this machine"
        self.run = run
        self.peer_ids = peer_ids
        self.certificate = ""
        self.peer_key = ""
        self._reader = reader
        self._writer = writer
        self._traffic = traffic
        self._sent_macs: FrameMacs | None = None
        self._received_macs: FrameMacs | None = None
        self._write_lock = asyncio.Lock()
        # when bytes last arrived
        self._is_closed = False
        self.heard_at = loop_time()
        # With 0, a drain waits until the kernel has taken everything, so that a payload's buffer
        # may be reused.
        writer.transport.set_write_buffer_limits(high=0)

    async def start_tls(self, context: ssl.SSLContext, own_certificate: str = "") -> None:
        """Encrypt the connection; this side is the acceptor if `own_certificate` (the certificate's
        hash) is given.

        Raises MessageError if the other side does not speak TLS 1.3, and ConnectionError.
        """
        try:
            await self._writer.start_tls(context)
        except ssl.SSLError as error:
            raise tls_refusal(error) from None
        # asyncio's TLS pauses writers at the limit, not above it, so with 0 they would never
        # continue.
        self._writer.transport.set_write_buffer_limits(high=1)
        tls = self._writer.get_extra_info("ssl_object")
        self.certificate = own_certificate or hash_certificate(tls.getpeercert(binary_form=True))

    async def write(
        self, header: Header, payload: memoryview | bytes, stall_seconds: float | None = None
    ) -> None:
        """Send one frame, set its `num_bytes`, and return when it has left this process. Raises
        ConnectionError.

        Raises TimeoutError if the other side accepts no bytes for `stall_seconds`. A write that was
        cancelled or has timed out leaves half a frame behind, so close the stream after it.
        """
        raw = pack_header(replace(header, num_bytes=len(payload)), self.run)
        view = memoryview(payload)
        async with self._write_lock:
            mac = self._sent_macs.begin() if self._sent_macs else None
            if len(view) <= COPIED_BYTES:
                await self._write_at_once(raw + bytes(view), mac, stall_seconds)
            else:
                await self._write_in_pieces(raw, view, mac, stall_seconds)

    async def read(
        self,
        max_bytes: int | Callable[[], int],
        admit: Callable[[int], Awaitable[None]] | None = None,
    ) -> tuple[Header, torch.Tensor]:
        """Read a frame and return its header and payload (1-D uint8). Raises MessageError,
        ConnectionError, or CutOffError within a frame.

        If `max_bytes` is a function, it is called when the header has arrived. `admit` is awaited
        with the payload's size before memory is allocated for it. The payload then has BODY_SECONDS
        to arrive; afterwards TimeoutError is raised.
        """
        raw = await self._read_whole(HEADER_BYTES)
        header = parse_header(
            raw, self.run, max_bytes if isinstance(max_bytes, int) else max_bytes()
        )
        if admit is not None:
            await admit(header.num_bytes)
        mac = self._received_macs.begin() if self._received_macs else None
        if mac:
            mac.update(raw)
        payload = torch.empty(header.num_bytes, dtype=torch.uint8)
        view = view_of(payload)
        filled = 0
        async with asyncio.timeout(None if admit is None else BODY_SECONDS):
            while filled < header.num_bytes:
                with tls_errors():
                    piece = await self._reader.read(min(PIECE_BYTES, header.num_bytes - filled))
                if not piece:
                    raise self._end("within a frame")
                view[filled : filled + len(piece)] = piece
                filled += len(piece)
                self._traffic.bytes_received += len(piece)
                self.heard_at = loop_time()
                if mac:
                    mac.update(piece)
        if mac and not hmac.compare_digest(
            await self._read_whole(MAC_BYTES, "within a frame"), mac.digest()
        ):
            raise RefusedError(
                "forged", "a frame was altered, repeated, or not sent by a holder of the run's key"
            )
        return header, payload

    async def finish(self) -> None:
        """Send nothing more, and discard incoming bytes until the other side ends the
        connection, too. Raises OSError.
        """
        if self._writer.can_write_eof():
            self._writer.write_eof()
        while await self._reader.read(PIECE_BYTES):
            pass

    @property
    def is_closed(self) -> bool:
        return self._is_closed or self._writer.transport.is_closing()

    def close(self) -> None:
        """Drop the connection and all unsent bytes. Idempotent."""
        self._is_closed = True
        with suppress(RuntimeError):  # the event loop may have been closed already
            self._writer.transport.abort()

    def use_macs(self, sent: FrameMacs, received: FrameMacs) -> None:
        """Add MACs to all further frames that are sent, and check the MACs of all further frames
        that are received.
        """
        self._sent_macs = sent
        self._received_macs = received

    async def _read_whole(self, num_bytes: int, where: str = "") -> bytes:
        try:
            with tls_errors():
                raw = await self._reader.readexactly(num_bytes)
        except asyncio.IncompleteReadError as error:
            raise self._end(where or ("within a header" if error.partial else "")) from None
        self._traffic.bytes_received += num_bytes
        self.heard_at = loop_time()
        return raw

    def _end(self, where: str) -> ConnectionError:
        """Build the error for a connection that has ended; `where` is empty between frames."""
        if where and not self._is_closed:
            return CutOffError(f"the connection ended {where}")
        return ConnectionResetError("the connection was closed")

    async def _write_at_once(
        self, frame: bytes, mac: "hashlib.blake2b | None", stall_seconds: float | None
    ) -> None:
        if mac:
            mac.update(frame)
            frame += mac.digest()
        async with asyncio.timeout(stall_seconds):
            await self._write_bytes(frame)

    async def _write_in_pieces(
        self,
        raw: bytes,
        view: memoryview,
        mac: "hashlib.blake2b | None",
        stall_seconds: float | None,
    ) -> None:
        pieces = [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]
        for piece in (raw, *pieces):
            if mac:
                mac.update(piece)
            async with asyncio.timeout(stall_seconds):
                await self._write_bytes(piece)
            if mac and len(piece) == PIECE_BYTES:
                await asyncio.sleep(0)  # a drain does not yield while the kernel accepts all bytes
        if mac:
            await self._write_bytes(mac.digest())

    async def _write_bytes(self, data: memoryview | bytes) -> None:
        if self._writer.transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._writer.write(data)
        with tls_errors():
            await self._writer.drain()
        self._traffic.bytes_sent += len(data)


@contextmanager
def tls_errors() -> Iterator[None]:
    """Convert TLS errors within the block into ConnectionResetError: the connection's bytes were
    altered.
    """
    try:
        yield
    except ssl.SSLError as error:
        raise ConnectionResetError(f"TLS ended the connection: {error.reason or error}") from None


def tls_refusal(error: ssl.SSLError) -> RefusedError:
    """Build the error for a peer that does not begin TLS 1.3."""
    return RefusedError("tls", f"it does not begin TLS 1.3: {error.reason or error}")


def refusal_error(text: torch.Tensor) -> ConnectionRefusedError:
    """Build the error for a stream that the other side refused, from the payload of its REFUSAL."""
    return ConnectionRefusedError(
        f"it refused this island: {printable(text_of(text), MAX_HELLO_BYTES)}"
    )


def check_payload(payload: torch.Tensor) -> torch.Tensor:
    """Return the payload. Raises ValueError unless it is a contiguous 1-D uint8 tensor."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise ValueError(
            f"a payload is 1-D contiguous uint8, got {payload.dtype} of shape "
            f"{tuple(payload.shape)}"
        )
    return payload


def view_of(payload: torch.Tensor) -> memoryview:
    """Return the bytes of a payload without copying them."""
    return memoryview(check_payload(payload).numpy())  # pyright: ignore[reportArgumentType]


def text_of(payload: torch.Tensor) -> str:
    """Decode a payload as text. Raises MessageError if it is not UTF-8."""
    try:
        return bytes(view_of(payload)).decode()
    except UnicodeDecodeError:
        raise MessageError("a text that is not UTF-8") from None


def unpack_call(message: bytes | memoryview) -> tuple[str, bytes]:
    """Split a call into its kind and body. Raises MessageError if it is malformed."""
    if not message or len(message) < 1 + message[0]:
        raise RefusedError("header", "a call without its kind")
    try:
        return bytes(message[1 : 1 + message[0]]).decode(), bytes(message[1 + message[0] :])
    except UnicodeDecodeError:
        raise RefusedError("header", "a call whose kind is not UTF-8") from None
