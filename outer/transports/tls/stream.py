"""Frames on a TLS connection of our own, without asyncio's streams: a payload is read directly into
its buffer.

Short data are read and written on the event loop: handshakes, headers, small payloads. So strangers
and idle connections hold no thread. Longer payloads are moved in a thread, because OpenSSL lets
other threads run while it encrypts.
"""

import asyncio
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from outer.identity.tls import TlsIdentity, hash_certificate
from outer.network.endpoints import Traffic
from outer.network.event_loop import WaitingThreads, in_thread
from outer.network.frames import (
    HEADER_BYTES,
    CutOffError,
    Header,
    PeerIds,
    pack_header,
    parse_header,
    tls_refusal,
    view_of,
)
from outer.network.run_key import FrameMacs

THREAD_BYTES = 1 << 16
"""Longer payloads are moved in a thread. For shorter ones, switching threads would take longer."""
RECORD_BYTES = 1 << 15
"""Upper bound of the bytes that one TLS record takes on the wire."""
WAKE_BYTES = 1 << 15
"""A thread that waits for a payload wakes when this number of bytes has arrived.

With 128 KiB new connections were slow over long round trips, probably because their window was
limited to this size.
"""
Direction = Literal["read", "write"]
T = TypeVar("T")


@dataclass(frozen=True)
class StreamOwner:
    """The data that all streams of a transport share."""

    tls: TlsIdentity
    run: bytes
    traffic: Traffic
    threads: WaitingThreads
    allocate: Callable[[int], torch.Tensor]
    """Function that allocates the memory for a payload: 1-D uint8."""


class TlsStream:
    """A Stream (outer.network.handshake) over TLS. One task reads; any number may write. An error
    closes it.
    """

    def __init__(
        self, connection: socket.socket, owner: StreamOwner, peer: str, *, is_acceptor: bool
    ) -> None:
        """Create a stream on a connected socket, which is closed with the stream. Call
        `handshake` before anything else.
        """
        connection.setblocking(False)
        with suppress(OSError):  # it may have ended already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = owner.tls.server if is_acceptor else owner.tls.client
        self._socket = context.wrap_socket(
            connection, server_side=is_acceptor, do_handshake_on_connect=False
        )
        self.peer = peer
        self.peer_key = ""
        self.run = owner.run
        self.peer_ids: PeerIds | None = None  # no libp2p here
        self.certificate = owner.tls.certificate if is_acceptor else ""
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._writing = asyncio.Lock()
        self._calling = asyncio.Lock()
        """One lock for a whole frame, and one for OpenSSL's state of the connection, which
        allows one call at a time."""
        self._waits: dict[Direction, asyncio.Future[None]] = {}
        self._guard = threading.Lock()
        self._is_closed = self._is_in_thread = False
        self._wakes_at = 1
        self.bytes_sent = 0

    async def handshake(self) -> None:
        """Begin TLS 1.3. Raises MessageError if the other side does not begin it, and
        ConnectionError.
        """
        try:
            await self._perform(self._socket.do_handshake)
        except ConnectionResetError as error:
            if isinstance(error.__cause__, ssl.SSLError):
                raise tls_refusal(error.__cause__) from None
            raise
        self.certificate = self.certificate or hash_certificate(
            self._socket.getpeercert(binary_form=True)
        )

    async def write(self, header: Header, payload: memoryview | bytes) -> None:
        """Send one frame, set its `num_bytes`, and return when it has left this process. Raises
        ConnectionError.
        """
        raw = pack_header(replace(header, num_bytes=len(payload)), self.run)
        view = memoryview(payload)
        async with self._writing:
            try:
                if len(view) <= THREAD_BYTES:
                    await self._send(memoryview(raw + view))
                else:
                    await self._send(memoryview(raw))
                    await self._in_thread(lambda: self._send_all(view))
            except BaseException:  # half a frame may have been sent
                self.close()
                raise
        self.bytes_sent += len(raw) + len(view)
        self._owner.traffic.bytes_sent += len(raw) + len(view)

    async def read(self, max_bytes: int) -> tuple[Header, torch.Tensor]:
        """Read a frame; its payload is 1-D uint8. Raises MessageError, ConnectionError, or
        CutOffError within it.
        """
        raw = bytearray(HEADER_BYTES)
        await self._fill(memoryview(raw), "")
        header = parse_header(bytes(raw), self.run, max_bytes)
        payload = self._owner.allocate(header.num_bytes)
        view = view_of(payload)
        if header.num_bytes <= THREAD_BYTES:
            await self._fill(view, "within a frame")
        else:
            await self._in_thread(lambda: self._receive_all(view))
        self._owner.traffic.bytes_received += HEADER_BYTES + header.num_bytes
        return header, payload

    async def finish(self) -> None:
        """Send nothing more, and discard incoming bytes until the other side ends the
        connection, too. Raises OSError.
        """
        socket.socket.shutdown(self._socket, socket.SHUT_WR)
        rest = bytearray(THREAD_BYTES)
        while await self._perform(lambda: self._socket.recv_into(rest)):
            pass

    def use_macs(self, sent: FrameMacs, received: FrameMacs) -> None:
        raise AssertionError("TLS protects the frames")

    def close(self) -> None:
        """Drop the connection and all unsent bytes, and end all waits for it. Idempotent. Must
        be called on the event loop.
        """
        if self._is_closed:
            return
        for direction in list(self._waits):
            self._end_wait(direction)
        with self._guard:
            self._is_closed = True
            with suppress(OSError):  # the other side may have ended it
                # It wakes a thread that waits. SSLSocket's own method would let that thread
                # continue without TLS.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            if not self._is_in_thread:
                self._socket.close()

    async def _send(self, data: memoryview) -> None:
        while data:
            data = data[await self._perform(lambda rest=data: self._socket.send(rest)) :]

    async def _fill(self, view: memoryview, where: str) -> None:
        filled = 0
        while filled < len(view):
            received = await self._perform(
                lambda start=filled: self._socket.recv_into(view[start:])
            )
            if not received:
                raise self._end(where or ("within a header" if filled else ""))
            filled += received

    async def _perform(self, operation: Callable[[], T]) -> T:
        """Call an operation of the socket until it succeeds without waiting. Raises
        ConnectionError.
        """
        while True:
            async with self._calling:
                try:
                    return self._call(operation)
                except ssl.SSLWantReadError:
                    wanted: Direction = "read"
                except ssl.SSLWantWriteError:
                    wanted = "write"
            # Other tasks may use the connection during this wait, because a reader may wait for
            # ever.
            await self._until(wanted)

    async def _until(self, direction: Direction) -> None:
        """Wait until the socket can be read or written, or is closed."""
        ready = self._waits[direction] = self._loop.create_future()
        watch = self._loop.add_reader if direction == "read" else self._loop.add_writer
        watch(self._socket.fileno(), _settle, ready)
        try:
            await ready
        finally:
            if self._waits.get(direction) is ready:
                self._end_wait(direction)

    def _end_wait(self, direction: Direction) -> None:
        unwatch = self._loop.remove_reader if direction == "read" else self._loop.remove_writer
        unwatch(self._socket.fileno())
        _settle(self._waits.pop(direction))

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Run `work`, which uses the socket, in a thread. A cancellation closes the stream."""
        async with self._calling:
            if self._is_closed:
                raise self._end("")
            self._is_in_thread = True
            try:
                await in_thread(lambda: self._work(work), self._owner.threads.start)
            except BaseException:
                self.close()
                raise

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._guard:
                self._is_in_thread = False
                if self._is_closed:
                    self._socket.close()

    def _send_all(self, view: memoryview) -> None:
        while view:
            view = view[self._wait_for(lambda rest=view: self._socket.send(rest)) :]

    def _receive_all(self, view: memoryview) -> None:
        try:
            while view:
                received = self._wait_for(lambda rest=view: self._socket.recv_into(rest), len(view))
                if not received:
                    raise self._end("within a frame")
                view = view[received:]
        finally:
            self._wake_at(1)

    def _wait_for(self, operation: Callable[[], int], num_bytes: int = 0) -> int:
        """Call an operation of the socket in a thread until it succeeds without waiting.
        `num_bytes` are still to arrive.

        Raises ConnectionError.
        """
        while True:
            try:
                return self._call(operation)
            except ssl.SSLWantReadError:
                events = select.POLLIN
                # OpenSSL may hold most of an incomplete record, so up to a record less may still
                # arrive on the socket.
                self._wake_at(min(WAKE_BYTES, num_bytes - RECORD_BYTES))
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            poll = select.poll()
            poll.register(self._socket, events)
            poll.poll()

    def _wake_at(self, num_bytes: int) -> None:
        """Let waits for the socket end when `num_bytes` have arrived, instead of at each packet."""
        num_bytes = max(num_bytes, 1)
        if num_bytes != self._wakes_at and not self._is_closed:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes

    def _call(self, operation: Callable[[], T]) -> T:
        if self._is_closed:
            raise self._end("")
        try:
            return operation()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            raise ConnectionResetError(
                f"TLS ended the connection: {error.reason or error}"
            ) from error
        except ConnectionError:
            raise
        except OSError as error:  # no route, a timeout of the kernel
            raise ConnectionResetError(str(error)) from None

    def _end(self, where: str) -> ConnectionError:
        """Build the error for a connection that has ended; `where` is empty between frames."""
        if where and not self._is_closed:
            return CutOffError(f"the connection ended {where}")
        return ConnectionResetError("the connection was closed")


def _settle(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
