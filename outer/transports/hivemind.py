"""Payloads over libp2p streams: encrypted, through NAT, streams of their own for each ordered pair of endpoints."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import torch

from outer.errors import DeadlineError, MessageError, PeerLost, TransportError, first_cause
from outer.keys import Trust
from outer.refusals import Refusals, RefusedError
from outer.transports.base import Endpoint, Tag, Traffic
from outer.transports.hivemind_addresses import PeerAddress, parse_address
from outer.transports.hivemind_daemon import Daemon
from outer.transports.mailbox import Mailbox
from outer.wire import MAX_HELLO_BYTES, CutOffError, FrameStream, Header, Kind, hash_of, refused_by_peer, view_of

log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 1 << 30
MAX_STREAMS = 16
"""Of an endpoint in each direction, while the group is smaller than that. libp2p allows a stream a quarter of a
megabyte on its way, and says that there is room for more on the connection that the other direction fills."""
MAX_PARKED = 1024
"""Incoming streams of a group that this endpoint has not joined yet."""


class HivemindTransport:
    """See outer.transports.base.Transport. Endpoints of this island itself are not connected."""

    def __init__(self, daemon: Daemon, run_id: str, me: Endpoint, connect_seconds: float, trust: Trust) -> None:
        self.traffic = Traffic()
        self._daemon, self._me, self._connect_seconds, self._trust = daemon, me, connect_seconds, trust
        self._run_id, self._run = run_id, hash_of(run_id, "bulk")
        self._group: _Group | None = None
        self._num_parked = 0
        self._changed = asyncio.Event()
        self._is_closed = False

    async def open(self) -> None:
        """Let peers dial; to be called once, before the address is given to anybody."""
        await self._daemon.serve(_handler_name(self._run_id, self._me.rank), self._accept)

    @property
    def address(self) -> str:
        return str(self._daemon.address)

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.disconnect()
        others = {e: parse_address(a) for e, a in addresses.items() if e.island != self._me.island}
        # All endpoints see the same addresses, so they count the same streams.
        num_streams = max(MAX_STREAMS // len(addresses), 1)
        group = self._group = _Group(epoch, others, num_streams, self._trust.refusals)
        self._wake_parked()
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
        view = view_of(payload)
        try:
            async with group.idle_stream(to) as stream:
                await stream.write(Header(Kind.PAYLOAD, self._me.rank, tag, num_bytes=len(view)), view)
        except ConnectionError as error:
            lost = PeerLost(to.island, str(error))
            group.lose(to, lost)
            raise lost from None

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
        self._wake_parked()

    async def _dial(self, group: "_Group", other: Endpoint, address: PeerAddress) -> None:
        try:
            reader, writer = await self._daemon.open_stream(address, _handler_name(self._run_id, address.rank))
        except PeerLost as error:
            raise PeerLost(other.island, error.cause) from None
        stream = self._stream(reader, writer, address.peer_id)
        try:
            await stream.say_hello(self._me, group.epoch, to=other)
        except (MessageError, ConnectionError) as error:
            stream.close()
            if isinstance(error, MessageError):
                self._trust.refusals.add_error(stream.peer, error)
            raise PeerLost(other.island, str(error)) from None
        group.add_outgoing(other, stream)

    async def _accept(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one incoming stream: its payloads go to the group that its hello names, and to no other."""
        stream = self._stream(reader, writer, peer_id)
        if self._num_parked >= MAX_PARKED:
            self._trust.refusals.add(peer_id, "streams", f"more than {MAX_PARKED} streams wait for a group")
            stream.close()
            return
        self._num_parked += 1
        try:
            group, source = await self._match(peer_id, stream)
        except (MessageError, TimeoutError, ConnectionError) as error:
            if isinstance(error, MessageError):
                await stream.refuse(error, self._trust.refusals)
            log.debug("dropped an incoming stream: %s", error)
            stream.close()
            return
        finally:
            self._num_parked -= 1
        await group.receive(source, stream)

    async def _match(self, peer_id: str, stream: FrameStream) -> "tuple[_Group, Endpoint]":
        """The group an incoming stream belongs to, waited for: its dialer may have joined before this endpoint."""
        async with asyncio.timeout(self._connect_seconds):
            source, epoch = await stream.read_hello(self._me)
            while (group := self._group) is None or group.epoch != epoch:
                if self._is_closed:
                    raise ConnectionResetError("closed before its group was joined")
                await self._changed.wait()
        group.check_source(source, peer_id)
        return group, source

    def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> FrameStream:
        stream = FrameStream(reader, writer, self._run, self.traffic, self._trust.key)
        stream.peer = peer_id
        return stream

    def _wake_parked(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Group:
    """The streams of one epoch: `num_streams` out to and as many in from each other endpoint."""

    def __init__(
        self, epoch: str, addresses: Mapping[Endpoint, PeerAddress], num_streams: int, refusals: Refusals
    ) -> None:
        self.epoch, self._refusals = epoch, refusals
        self.mailbox = Mailbox(addresses)
        self.outgoing: dict[Endpoint, list[FrameStream]] = {e: [] for e in addresses}
        self._addresses, self._num_streams = addresses, num_streams
        self._idle: dict[Endpoint, asyncio.Queue[FrameStream]] = {e: asyncio.Queue() for e in addresses}
        self._incoming: dict[Endpoint, list[FrameStream]] = {e: [] for e in addresses}
        self._watching: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def missing(self) -> list[Endpoint]:
        """The endpoints that have not joined yet."""
        return [e for e in self._addresses if min(len(self._incoming[e]), len(self.outgoing[e])) < self._num_streams]

    async def wait_for_all(self) -> None:
        """Return when every endpoint has dialled this one. Raises what one of them failed with."""
        while any(len(streams) < self._num_streams for streams in self._incoming.values()):
            for other in self._addresses:
                if error := self.mailbox.failure_of(other):
                    raise error
            self._changed.clear()
            await self._changed.wait()

    def check_source(self, source: Endpoint, peer_id: str) -> None:
        """Raise MessageError unless the stream's proved peer id is that of the endpoint it claims to be."""
        address = self._addresses.get(source)
        if address is None or address.peer_id != peer_id:
            raise RefusedError("name", f"a stream from peer {peer_id}, which is not {source} of this group")
        if len(self._incoming[source]) >= self._num_streams:
            raise RefusedError("streams", f"more than {self._num_streams} streams from {source}")

    def add_outgoing(self, other: Endpoint, stream: FrameStream) -> None:
        """Keep a dialled stream; nothing comes back on it but its end."""
        if self._is_closed:
            stream.close()
            return
        self.outgoing[other].append(stream)
        self._idle[other].put_nowait(stream)
        self._watching.append(asyncio.create_task(self._watch(other, stream)))

    @asynccontextmanager
    async def idle_stream(self, to: Endpoint) -> AsyncIterator[FrameStream]:
        """A stream that nothing else is sent on meanwhile, waited for."""
        stream = await self._idle[to].get()
        try:
            yield stream
        finally:
            self._idle[to].put_nowait(stream)

    async def receive(self, source: Endpoint, stream: FrameStream) -> None:
        """Put what comes on an incoming stream into the mailbox until it ends."""
        self._incoming[source].append(stream)
        self._changed.set()
        try:
            while not self._is_closed:
                await self.mailbox.wait_for_space(source)
                header, payload = await stream.read(MAX_PAYLOAD_BYTES)
                if header.kind is not Kind.PAYLOAD:
                    raise RefusedError("header", f"{source} sent {header.kind.name}, PAYLOAD expected")
                self.mailbox.put(source, header.tag, payload)
        except ConnectionError as error:
            if isinstance(error, CutOffError):
                self._refusals.add(stream.peer, "truncated", str(error))
            self.lose(source, PeerLost(source.island, str(error)))
        except MessageError as error:
            self._refusals.add_error(stream.peer, error)
            self.lose(source, error)

    def lose(self, other: Endpoint, error: TransportError) -> None:
        """Give up on an endpoint and close its streams, so that it hears of it too."""
        self.mailbox.fail(other, error)
        for stream in (*self.outgoing[other], *self._incoming[other]):
            stream.close()
        self._changed.set()

    def close(self) -> None:
        """Close every stream and fail whatever waits."""
        self._is_closed = True
        self.mailbox.fail_all("this group was left")
        for streams in (*self.outgoing.values(), *self._incoming.values()):
            for stream in streams:
                stream.close()
        for task in self._watching:
            task.cancel()
        self._changed.set()

    async def _watch(self, other: Endpoint, stream: FrameStream) -> None:
        try:
            header, payload = await stream.read(MAX_HELLO_BYTES)
            if header.kind is Kind.REFUSAL:
                raise refused_by_peer(payload)
            raise RefusedError("header", f"{other} wrote on a stream that it only reads")
        except MessageError as error:
            self._refusals.add_error(stream.peer, error)
            self.lose(other, error)
        except ConnectionError as error:
            self.lose(other, PeerLost(other.island, str(error)))


def _handler_name(run_id: str, rank: int) -> str:
    return f"diloco/{run_id}/bulk/{rank}"
