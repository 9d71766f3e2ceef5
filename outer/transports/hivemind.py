"""A transport over libp2p streams: encrypted, through NAT, with separate streams for each ordered pair of endpoints."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from outer.errors import DeadlineError, MessageError, PeerLost, TransportError, first_cause
from outer.network.endpoints import MAX_PAYLOAD_BYTES, Endpoint, Tag, Traffic
from outer.network.event_loop import ChangeSignal
from outer.network.frames import (
    MAX_HELLO_BYTES,
    CutOffError,
    FrameStream,
    Header,
    Kind,
    PeerIds,
    hash_names,
    refusal_error,
    view_of,
)
from outer.network.handshake import check_access, read_hello, say_hello
from outer.network.rejections import Guest, Guests, RefusedError
from outer.network.run_key import PeerAuth
from outer.transports.hivemind_addresses import PeerAddress, parse_address
from outer.transports.hivemind_daemon import Daemon, stream_name
from outer.transports.mailbox import Mailbox

log = logging.getLogger(__name__)

MAX_STREAMS = 16
"""Number of an endpoint's streams in each direction, shared by the group (at least one for each other endpoint).

libp2p allows a quarter of a megabyte in flight per stream, and its window updates share a connection with the payloads
of the other direction, so one stream does not fill a link."""
MAX_PARKED, MAX_PARKED_OF_ISLAND = 1024, 128
"""Limits for incoming streams of groups that this endpoint has not joined yet: of all islands, and of one."""


class HivemindTransport:
    """A Transport (outer.transports.base) over libp2p. Endpoints of the same island are not connected."""

    is_uneven = False

    def __init__(self, daemon: Daemon, run_id: str, me: Endpoint, connect_seconds: float) -> None:
        self.traffic, self.address = Traffic(), str(daemon.address)
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self._daemon, self._me, self._connect_seconds = daemon, me, connect_seconds
        self._auth = replace(daemon.auth, learns_names=False)
        self._run_id, self._run = run_id, hash_names(run_id, "bulk")
        self._group: _Group | None = None
        self._guests = Guests()
        self._parked: Counter[str] = Counter()
        """Streams by island that have said who they are and wait for their group."""
        self._changed = ChangeSignal()
        self._is_closed = False

    async def open(self) -> None:
        """Accept streams from peers. Call this once, before the address is published."""
        await self._daemon.serve(stream_name(self._run_id, "bulk", self._me.rank), self._accept)

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.disconnect()
        others = {e: parse_address(a) for e, a in addresses.items() if e.island != self._me.island}
        # All endpoints see the same addresses, so they compute the same number of streams.
        num_streams = max(MAX_STREAMS // len(addresses), 1)
        group = self._group = _Group(epoch, others, num_streams, self._auth, self.max_payload_bytes)
        self._changed.notify()
        try:
            async with asyncio.timeout(self._connect_seconds), asyncio.TaskGroup() as tasks:
                for other, address in others.items():
                    for _ in range(num_streams):
                        tasks.create_task(self._dial(group, other, address))
                tasks.create_task(group.wait_for_all())
        except TimeoutError:
            missing = ", ".join(str(other) for other in group.missing())
            raise DeadlineError(f"{missing} did not join within {self._connect_seconds:g} s") from None
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        group = self._group
        if group is None or to not in group.outgoing:
            raise PeerLost(to.island, f"{to} is not in this group")
        if error := group.mailbox.failure_of(to):
            raise error
        stream = await group.idle[to].get()
        try:
            await stream.write(Header(Kind.PAYLOAD, self._me.rank, tag), view_of(payload))
        except ConnectionError as error:
            lost = PeerLost(to.island, str(error))
            group.lose(to, lost)
            raise lost from None
        finally:
            group.idle[to].put_nowait(stream)

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        if self._group is None:
            raise PeerLost(source.island, "this endpoint has joined no group")
        return await self._group.mailbox.get(source, tag, num_bytes)

    async def disconnect(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    async def close(self) -> None:
        self._is_closed = True
        await self.disconnect()
        self._changed.notify()

    async def _dial(self, group: "_Group", other: Endpoint, address: PeerAddress) -> None:
        try:
            reader, writer = await self._daemon.open_stream(address, stream_name(self._run_id, "bulk", address.rank))
        except PeerLost as error:
            raise PeerLost(other.island, error.cause) from None
        stream = self._stream(reader, writer, address.peer_id)
        try:
            await say_hello(stream, self._me, self._auth, group.epoch, to=other)
        except (MessageError, ConnectionError) as error:
            stream.close()
            if isinstance(error, MessageError):
                self._auth.rejections.add_error(stream.peer, error)
            raise PeerLost(other.island, str(error)) from None
        group.add_outgoing(other, stream)

    async def _accept(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one incoming stream. Its payloads go only to the group that its hello names."""
        stream = self._stream(reader, writer, peer_id)
        # Another island's stream must not wait behind those of a stranger, who may have many peer ids.
        guest = self._guests.enter(peer_id, stream.close)
        try:
            group, source = await self._match(peer_id, stream, guest)
        except (MessageError, TimeoutError, ConnectionError) as error:
            if isinstance(error, MessageError):
                await stream.refuse(error, self._auth.rejections)
            log.debug("dropped an incoming stream: %s", error)
            stream.close()
            return
        finally:
            guest.leave()
        await group.receive(source, stream)

    async def _match(self, peer_id: str, stream: FrameStream, guest: Guest) -> "tuple[_Group, Endpoint]":
        """Wait for the group of an incoming stream, whose dialer may join before this endpoint, and return it."""
        async with asyncio.timeout(self._connect_seconds):
            source, epoch = await read_hello(stream, self._me, self._auth)
            guest.leave()
            with self._park(source.island):
                await self._changed.wait_until(lambda: self._is_closed or self._joined(epoch) is not None)
        group = self._joined(epoch)
        if group is None:
            raise ConnectionResetError("closed before its group was joined")
        group.check_source(source, peer_id)
        check_access(stream, self._auth, source)  # its name may have become known since the handshake
        return group, source

    @contextmanager
    def _park(self, island: str) -> Iterator[None]:
        """Count a stream while it waits for its group. Raises RefusedError if too many do."""
        if self._parked.total() >= MAX_PARKED or self._parked[island] >= MAX_PARKED_OF_ISLAND:
            raise RefusedError("streams", f"{self._parked[island]} streams of {island} wait for a group")
        self._parked[island] += 1
        try:
            yield
        finally:
            self._parked[island] -= 1
            self._parked += Counter()  # keeps no names of nothing

    def _joined(self, epoch: str) -> "_Group | None":
        return self._group if self._group is not None and self._group.epoch == epoch else None

    def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> FrameStream:
        stream = FrameStream(reader, writer, self._run, self.traffic, PeerIds(self._daemon.peer_id, peer_id))
        stream.peer = peer_id
        return stream


class _Group:
    """The streams of one epoch: `num_streams` in each direction for each other endpoint."""

    def __init__(
        self,
        epoch: str,
        addresses: Mapping[Endpoint, PeerAddress],
        num_streams: int,
        auth: PeerAuth,
        max_payload_bytes: int,
    ) -> None:
        self._max_payload_bytes = max_payload_bytes
        self.epoch, self._auth, self._rejections = epoch, auth, auth.rejections
        self.mailbox = Mailbox(addresses)
        self.outgoing: dict[Endpoint, list[FrameStream]] = {e: [] for e in addresses}
        self._addresses, self._num_streams = addresses, num_streams
        self.idle: dict[Endpoint, asyncio.Queue[FrameStream]] = {e: asyncio.Queue() for e in addresses}
        self._incoming: dict[Endpoint, list[FrameStream]] = {e: [] for e in addresses}
        self._watching: list[asyncio.Task[None]] = []
        self._changed = ChangeSignal()
        self._is_closed = False

    def missing(self) -> list[Endpoint]:
        return [e for e in self._addresses if min(len(self._incoming[e]), len(self.outgoing[e])) < self._num_streams]

    async def wait_for_all(self) -> None:
        await self._changed.wait_until(self._has_all_incoming)

    def _has_all_incoming(self) -> bool:
        """Whether every endpoint has dialled this one. Raises the error of an endpoint that fails."""
        if all(len(streams) >= self._num_streams for streams in self._incoming.values()):
            return True
        self.mailbox.raise_failure(self._addresses)
        return False

    def check_source(self, source: Endpoint, peer_id: str) -> None:
        """Raise MessageError unless the stream's proven peer id belongs to the endpoint that it claims to be."""
        address = self._addresses.get(source)
        if address is None or address.peer_id != peer_id:
            raise RefusedError("name", f"a stream from peer {peer_id}, which is not {source} of this group")
        if len(self._incoming[source]) >= self._num_streams:
            raise RefusedError("streams", f"more than {self._num_streams} streams from {source}")

    def add_outgoing(self, other: Endpoint, stream: FrameStream) -> None:
        """Keep a dialled stream. The other side sends nothing on it and only ends it."""
        if self._is_closed:
            stream.close()
            return
        self.outgoing[other].append(stream)
        self.idle[other].put_nowait(stream)
        self._watching.append(asyncio.create_task(self._watch(other, stream)))

    async def receive(self, source: Endpoint, stream: FrameStream) -> None:
        """Move payloads from an incoming stream into the mailbox until the stream ends."""
        self._incoming[source].append(stream)
        self._changed.notify()
        try:
            while not self._is_closed:
                await self.mailbox.wait_for_space(source)
                header, payload = await stream.read(self._max_payload_bytes)
                check_access(stream, self._auth, source)  # it may have been banned meanwhile
                if header.kind is not Kind.PAYLOAD:
                    raise RefusedError("header", f"{source} sent {header.kind.name}, PAYLOAD expected")
                self.mailbox.put(source, header.tag, payload)
        except ConnectionError as error:
            if isinstance(error, CutOffError):
                self._rejections.add(stream.peer, "truncated", str(error))
            self.lose(source, PeerLost(source.island, str(error)))
        except MessageError as error:
            self._rejections.add_error(stream.peer, error)
            self.lose(source, error)

    def lose(self, other: Endpoint, error: TransportError) -> None:
        """Give up on an endpoint and close its streams, which also informs the endpoint."""
        self.mailbox.fail(other, error)
        for stream in (*self.outgoing[other], *self._incoming[other]):
            stream.close()
        self._changed.notify()

    def close(self) -> None:
        self._is_closed = True
        self.mailbox.fail_all("this group was left")
        for streams in (*self.outgoing.values(), *self._incoming.values()):
            for stream in streams:
                stream.close()
        for task in self._watching:
            task.cancel()
        self._changed.notify()

    async def _watch(self, other: Endpoint, stream: FrameStream) -> None:
        try:
            header, payload = await stream.read(MAX_HELLO_BYTES)
            if header.kind is Kind.REFUSAL:
                raise refusal_error(payload)
            raise RefusedError("header", f"{other} wrote on a stream that it only reads")
        except MessageError as error:
            self._rejections.add_error(stream.peer, error)
            self.lose(other, error)
        except ConnectionError as error:
            self.lose(other, PeerLost(other.island, str(error)))
