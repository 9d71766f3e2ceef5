"""Frames on a byte stream between islands: a fixed header, then a payload. Every field is checked on arrival.

    magic 4 | version 1 | kind 1 | run 8 | rank 2 | round 4 | attempt 4 | phase 1 | part 4 | request 8 | length 8

`run` is a hash of the run's id and the stream's purpose, so that two runs never mix. The first frame of a stream
is a HELLO: the dialer's name and the group (an epoch of participants) that everything on this stream belongs to.
In a run with a key both sides then prove that they hold it (see outer.keys), and 16 bytes of MAC follow each payload.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

import torch

from outer.errors import MessageError
from outer.keys import MAC_BYTES, NONCE_BYTES, PROOF_BYTES, FrameMacs, Handshake, RunKey
from outer.refusals import Refusals, RefusedError, printable
from outer.transports.base import Endpoint, Phase, Tag, Traffic

MAGIC = b"DLCO"
VERSION = 1
_HEADER = struct.Struct("!4sBB8sHIIBIQQ")
HEADER_BYTES = _HEADER.size
PIECE_BYTES = 1 << 18
"""Written or read at once: large enough to be cheap, small enough to share the loop."""
MAX_HELLO_BYTES = 512
"""Of any frame before both sides know each other, and of a refusal."""
REFUSE_SECONDS = 1.0
KEY_CURE = "compare the files of island.run_key_file"
ISLAND_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

NO_TAG = Tag(0, 0, Phase.REDUCE, 0)


class Kind(IntEnum):
    """What a frame holds."""

    HELLO = 0  # the dialer's island, its group and, with a key, a nonce: lines of UTF-8; the rank is in the header
    PAYLOAD = 1
    CALL = 2
    REPLY = 3
    REFUSAL = 4  # the text of an error, as UTF-8; request 0: of the whole stream
    CHALLENGE = 5  # a nonce, a proof, the acceptor's island
    PROOF = 6


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
        raise RefusedError("header", f"a frame's header of {len(raw)} bytes, {HEADER_BYTES} expected")
    magic, version, kind, its_run, rank, round_number, attempt, phase, part, request, length = _HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise RefusedError("header", f"not a frame of version {VERSION}: it begins with {raw[:5].hex()}")
    if its_run != run:
        raise RefusedError("run", "a frame of another run")
    if length > max_bytes:
        raise RefusedError("size", f"a frame of {length} bytes, at most {max_bytes} are allowed")
    try:
        return Header(Kind(kind), rank, Tag(round_number, attempt, Phase(phase), part), request, length)
    except ValueError as error:
        raise RefusedError("header", f"a frame with an unknown code: {error}") from None


class CutOffError(ConnectionResetError):
    """The other side ended the connection within a frame."""


class FrameStream:
    """Frames over one connection, its bytes counted. One task reads; any number may write.

    After its hello has raised, and after any error, it is of no use but to be closed.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        run: bytes,
        traffic: Traffic,
        key: RunKey | None = None,
    ) -> None:
        self.peer = _peer_name(writer)
        """Whom errors name; whoever knows more may set it. After the hello it has the claimed name, too."""
        self._reader, self._writer, self._run, self._traffic, self._key = reader, writer, run, traffic, key
        self._sent_macs: FrameMacs | None = None
        self._received_macs: FrameMacs | None = None
        self._write_lock = asyncio.Lock()
        self._is_closed = False
        # A drain then waits until the kernel has all of it, so that a payload's buffer may be reused.
        writer.transport.set_write_buffer_limits(high=0)

    async def write(self, header: Header, payload: memoryview | bytes) -> None:
        """Send one frame; returns when `payload` has left this process. Raises ConnectionError.

        Cancelled in the middle it leaves half a frame behind: close the stream then.
        """
        assert header.num_bytes == len(payload), "a header must announce its payload's length"
        view = memoryview(payload)
        async with self._write_lock:
            mac = self._sent_macs.begin() if self._sent_macs else None
            pieces = [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]
            for piece in (pack_header(header, self._run), *pieces):
                if mac:
                    mac.update(piece)
                await self._write_bytes(piece)
                if mac and len(piece) == PIECE_BYTES:
                    await asyncio.sleep(0)  # a drain does not pause while the kernel takes all there is
            if mac:
                await self._write_bytes(mac.digest())

    async def read(self, max_bytes: int) -> tuple[Header, torch.Tensor]:
        """The next frame, its payload as 1-D uint8.

        Raises ConnectionError at the stream's end (CutOffError: within a frame), MessageError when malformed or forged.
        """
        raw = await self._read_whole(HEADER_BYTES)
        header = parse_header(raw, self._run, max_bytes)
        mac = self._received_macs.begin() if self._received_macs else None
        if mac:
            mac.update(raw)
        payload = torch.empty(header.num_bytes, dtype=torch.uint8)
        view = view_of(payload)
        filled = 0
        while filled < header.num_bytes:
            piece = await self._reader.read(min(PIECE_BYTES, header.num_bytes - filled))
            if not piece:
                raise self._end("within a frame")
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._traffic.bytes_received += len(piece)
            if mac:
                mac.update(piece)
        if mac and not hmac.compare_digest(await self._read_whole(MAC_BYTES, "within a frame"), mac.digest()):
            raise RefusedError("forged", "a frame that was altered, repeated, or not sent by a holder of the run's key")
        return header, payload

    async def say_hello(self, me: Endpoint, group: str = "", to: Endpoint | None = None) -> None:
        """Send the first frame: who dials, and the group that this stream belongs to.

        With a key it waits for the other side, which must prove that it holds it and is `to` (None: anybody). Raises
        MessageError when it does not, ConnectionRefusedError when it refuses this island.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        text = "\n".join([me.island, group, *([nonce.hex()] if self._key else [])]).encode()
        await self.write(Header(Kind.HELLO, me.rank, num_bytes=len(text)), text)
        if self._key is not None:
            await self._meet_acceptor(self._key, me, group, nonce, to)

    async def read_hello(self, me: Endpoint) -> tuple[Endpoint, str]:
        """Who the dialer is, and its group. Raises MessageError when the first frame is not a hello.

        Without a key the name is the dialer's claim; with one it has proved that it holds the key.
        """
        header, payload = await self.read(MAX_HELLO_BYTES)
        if header.kind is not Kind.HELLO:
            raise RefusedError("header", f"a stream that begins with {header.kind.name}, HELLO expected")
        island, group, nonce = [*text_of(payload).split("\n", 2), "", ""][:3]
        source = self._name(island, header.rank)
        if self._key is not None:
            await self._meet_dialer(self._key, me, source, group, nonce)
        elif nonce:
            raise RefusedError("key", "it holds a run key, and this island has none: set island.run_key_file")
        return source, group

    async def refuse(self, error: MessageError, refusals: Refusals) -> None:
        """Count it. An island of another run or key is told why, as far as it listens; a stranger hears nothing."""
        refusals.add_error(self.peer, error)
        if not isinstance(error, RefusedError) or error.kind not in ("run", "key"):
            return
        body = str(error).encode()[:MAX_HELLO_BYTES]
        with suppress(ConnectionError, TimeoutError, OSError):
            async with asyncio.timeout(REFUSE_SECONDS):
                await self.write(Header(Kind.REFUSAL, num_bytes=len(body)), body)
                self._writer.write_eof()
                # Closed with bytes unread, a socket takes back what it has sent.
                while await self._reader.read(PIECE_BYTES):
                    pass

    def close(self) -> None:
        """Drop the connection; what is unsent is lost. Idempotent."""
        self._is_closed = True
        with suppress(RuntimeError):  # the event loop may have been closed already
            self._writer.transport.abort()

    async def _meet_acceptor(
        self, key: RunKey, me: Endpoint, group: str, nonce: bytes, expected: Endpoint | None
    ) -> None:
        header, payload = await self.read(MAX_HELLO_BYTES)
        if header.kind is Kind.REFUSAL:
            raise refused_by_peer(payload)
        raw = bytes(view_of(payload))
        if header.kind is not Kind.CHALLENGE or len(raw) <= NONCE_BYTES + PROOF_BYTES:
            raise RefusedError("key", f"it answers a hello with {header.kind.name} of {len(raw)} bytes")
        its_nonce, proof = raw[:NONCE_BYTES], raw[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
        acceptor = self._name(raw[NONCE_BYTES + PROOF_BYTES :].decode(errors="replace"), header.rank)
        handshake = Handshake(key, self._run, me, acceptor, group, nonce + its_nonce)
        # Sent in any case: a side that holds another key must find out, too.
        await self.write(Header(Kind.PROOF, me.rank, num_bytes=PROOF_BYTES), handshake.proof("dialer"))
        if not handshake.is_proved("acceptor", proof):
            raise RefusedError("key", f"{acceptor} does not hold the run key that this island holds: {KEY_CURE}")
        if expected not in (None, acceptor):
            raise RefusedError("name", f"{acceptor} answers where {expected} was expected")
        self._sent_macs, self._received_macs = handshake.frame_macs("dialer"), handshake.frame_macs("acceptor")

    async def _meet_dialer(self, key: RunKey, me: Endpoint, source: Endpoint, group: str, nonce: str) -> None:
        if not re.fullmatch(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", nonce):
            raise RefusedError("key", f"{source} has no run key, and this run needs one: set island.run_key_file")
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = Handshake(key, self._run, source, me, group, bytes.fromhex(nonce) + own_nonce)
        challenge = own_nonce + handshake.proof("acceptor") + me.island.encode()
        await self.write(Header(Kind.CHALLENGE, me.rank, num_bytes=len(challenge)), challenge)
        header, payload = await self.read(MAX_HELLO_BYTES)
        if header.kind is not Kind.PROOF or not handshake.is_proved("dialer", bytes(view_of(payload))):
            raise RefusedError("key", f"{source} does not hold the run key that this island holds: {KEY_CURE}")
        self._sent_macs, self._received_macs = handshake.frame_macs("acceptor"), handshake.frame_macs("dialer")

    def _name(self, island: str, rank: int) -> Endpoint:
        """The other side as it calls itself."""
        if not ISLAND_NAME.fullmatch(island):
            raise RefusedError("header", f"a hello from {printable(island, 64)!r}, which is no island's name")
        endpoint = Endpoint(island, rank)
        self.peer = f"{endpoint} at {self.peer}"
        return endpoint

    async def _read_whole(self, num_bytes: int, where: str = "") -> bytes:
        try:
            raw = await self._reader.readexactly(num_bytes)
        except asyncio.IncompleteReadError as error:
            raise self._end(where or ("within a header" if error.partial else "")) from None
        self._traffic.bytes_received += num_bytes
        return raw

    def _end(self, where: str) -> ConnectionError:
        """The error for a connection that has ended; `where` is empty between frames."""
        if where and not self._is_closed:
            return CutOffError(f"the connection ended {where}")
        return ConnectionResetError("the connection was closed")

    async def _write_bytes(self, data: memoryview | bytes) -> None:
        if self._writer.transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._writer.write(data)
        await self._writer.drain()
        self._traffic.bytes_sent += len(data)


def refused_by_peer(text: torch.Tensor) -> ConnectionRefusedError:
    """The error for a stream that the other side refuses, from the payload of its REFUSAL."""
    return ConnectionRefusedError(f"it refused this island: {printable(text_of(text), MAX_HELLO_BYTES)}")


def _peer_name(writer: asyncio.StreamWriter) -> str:
    """The host that a connection leads to; no port, which says nothing of who that is."""
    name = writer.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else "this machine"


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
