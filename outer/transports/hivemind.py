"""Payloads over libp2p streams: encrypted, through NAT, one stream for each ordered pair of endpoints."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

import torch

from outer.errors import DeadlineError, MessageError, PeerLost, TransportError
from outer.transports.base import Endpoint, Tag, Traffic
from outer.transports.hivemind_daemon import Daemon, PeerAddress, parse_address
from outer.transports.mailbox import Mailbox
from outer.wire import FrameStream, Header, Kind, hash_of, view_of

log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 1 << 30
MAX_PARKED = 1024
"""Incoming streams of a group that this endpoint has not joined yet."""


class HivemindTransport:
    """See outer.transports.base.Transport. Endpoints of this island itself are not connected."""

    def __init__(self, daemon: Daemon, run_id: str, me: Endpoint, traffic: Traffic, connect_seconds: float) -> None:
        self.traffic = traffic
        self._daemon, self._run_id, self._me, self._connect_seconds = daemon, run_id, me, connect_seconds
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
        group = self._group = _Group(hash_of(self._run_id, "bulk", epoch), others)
        self._wake_parked()
        try:
            async with asyncio.timeout(self._connect_seconds), asyncio.TaskGroup() as tasks:
                for other, address in others.items():
                    tasks.create_task(self._dial(group, other, address))
                tasks.create_task(group.wait_for_all())
        except TimeoutError:
            missing = ", ".join(str(other) for other in group.missing())
            raise DeadlineError(f"{missing} did not join within {self._connect_seconds:g} s") from None
        except BaseExceptionGroup as errors:
            raise _first_cause(errors) from None

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        group = self._group
        stream = group.outgoing.get(to) if group else None
        if group is None or stream is None:
            raise PeerLost(to.island, f"{to} is not in this group")
        if error := group.mailbox.failure_of(to):
            raise error
        view = view_of(payload)
        try:
            await stream.write(Header(Kind.PAYLOAD, self._me.rank, tag, num_bytes=len(view)), view)
        except ConnectionError as error:
            group.lose(to, str(error))
            raise PeerLost(to.island, str(error)) from None

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
        stream = FrameStream(reader, writer, group.run, self.traffic)
        try:
            await stream.say_hello(self._me)
        except ConnectionError as error:
            raise PeerLost(other.island, str(error)) from None
        group.add_outgoing(other, stream)

    async def _accept(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one incoming stream: a payload never leaves the group that its hello names."""
        if self._num_parked >= MAX_PARKED:
            writer.transport.abort()
            return
        self._num_parked += 1
        try:
            group, stream, source = await self._match(peer_id, reader, writer)
        except (MessageError, TimeoutError, ConnectionError) as error:
            log.debug("dropped an incoming stream: %s", error)
            writer.transport.abort()
            return
        finally:
            self._num_parked -= 1
        await group.receive(source, stream)

    async def _match(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> "tuple[_Group, FrameStream, Endpoint]":
        """The group an incoming stream belongs to, waited for: its dialer may have joined before us."""
        async with asyncio.timeout(self._connect_seconds):
            header = await _peek(reader)
            while (group := self._group) is None or group.run != _run_of(header):
                if self._is_closed or reader.at_eof():
                    raise ConnectionResetError("closed before its group was joined")
                changed = self._changed
                await changed.wait()
        _push_back(reader, header)
        stream = FrameStream(reader, writer, group.run, self.traffic)
        source = await stream.read_hello()
        group.check_source(source, peer_id)
        return group, stream, source

    def _wake_parked(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
