"""A transport over streams of frames, for networks that open streams cheaply: libp2p and TLS.

Each ordered pair of endpoints has its own streams: the dialer sends payloads, the acceptor reads
them.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from outer.errors import DeadlineError, MessageError, PeerLost, first_cause
from outer.network.endpoints import MAX_PAYLOAD_BYTES, Endpoint, Kind, Tag, Traffic
from outer.network.event_loop import ChangeSignal
from outer.network.frames import Header, view_of
from outer.network.handshake import Stream, check_access, read_hello, refuse, say_hello, say_refusal
from outer.network.rejections import Guest, Guests, RefusedError
from outer.network.run_key import PeerAuth
from outer.transports.stream_group import Redial, StreamGroup

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""Longest time for TLS to begin, and then for the dialer of a stream to prove its identity."""
MAX_LEFT = 64
MAX_PARKED = 1024
MAX_PARKED_OF_ISLAND = 128
"""Limits for incoming streams of groups that this endpoint has not joined yet: of all islands, and
of one.
"""


class StreamTransport(ABC):
    """A Transport (outer.transports.base) over streams. Endpoints of the same island are not
    connected.
    """

    is_uneven = False

    def __init__(
        self, me: Endpoint, auth: PeerAuth, traffic: Traffic, address: str, connect_seconds: float
    ) -> None:
        self.traffic = traffic
        self.address = address
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self._me = me
        self._connect_seconds = connect_seconds
        self._auth = replace(auth, learns_names=False)
        self._group: StreamGroup | None = None
        self._guests = Guests()
        self._parked: Counter[str] = Counter()
        """Number of streams by island that have proved their identity and wait for their group."""
        self._left: dict[str, None] = {}
        """Groups that this endpoint has left, to which others may still try to send."""
        self._changed = ChangeSignal()
        self._is_closed = False

    @abstractmethod
    def _identify(self, other: Endpoint, address: str) -> str:
        """Return the identity that an endpoint with this address must prove. Raises PeerLost if
        the address is malformed.
        """

    @abstractmethod
    def _proved(self, stream: Stream) -> str:
        """Return the identity that the other side of a stream has proved in the handshake."""

    @abstractmethod
    def _count_streams(self, num_endpoints: int) -> tuple[int, int, int]:
        """Return the numbers of streams between two endpoints of a group: to dial, to wait for,
        and the most to accept.
        """

    def _has_spare_route(self, address: str) -> bool:
        """Return whether a stream to this address may be replaced by another route when it
        breaks.
        """
        return False

    @abstractmethod
    async def _open(self, other: Endpoint, address: str) -> Stream:
        """Open a stream to an endpoint. Raises PeerLost and MessageError. The caller limits the
        time.
        """

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.disconnect()
        others = {
            endpoint: address
            for endpoint, address in addresses.items()
            if endpoint.island != self._me.island
        }
        identities = {
            endpoint: self._identify(endpoint, address) for endpoint, address in others.items()
        }
        to_dial, to_await, most = self._count_streams(len(addresses))
        redial = Redial(
            {endpoint for endpoint, address in others.items() if self._has_spare_route(address)},
            self._has_spare_route(self.address),
            lambda other: self._dial(group, other, others[other]),
        )
        group = StreamGroup(
            epoch, identities, self._auth, self.max_payload_bytes, to_dial, to_await, most, redial
        )
        self._group = group
        self._left.pop(epoch, None)
        self._changed.notify()
        try:
            async with asyncio.timeout(self._connect_seconds), asyncio.TaskGroup() as tasks:
                for other, address in others.items():
                    for _ in range(to_dial):
                        tasks.create_task(self._dial(group, other, address))
                tasks.create_task(group.wait_for_all())
        except TimeoutError:
            missing = ", ".join(str(other) for other in group.missing())
            raise DeadlineError(
                f"{missing} did not join within {self._connect_seconds:g} s"
            ) from None
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        group = self._group
        if group is None or to not in group.outgoing:
            raise PeerLost(to.island, f"{to} is not in this group")
        if error := group.mailbox.failure_of(to):
            raise error
        if to in group.redial.outgoing:
            return await group.deliver(
                to, Header(Kind.PAYLOAD, self._me.rank, tag), view_of(payload)
            )
        stream = await group.take_idle(to)
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
        group = self._group
        self._group = None
        if group is not None:
            group.close()
            if group.redial.is_incoming:
                self._left[group.epoch] = None
            while len(self._left) > MAX_LEFT:
                del self._left[next(iter(self._left))]

    async def close(self) -> None:
        self._is_closed = True
        await self.disconnect()
        self._changed.notify()

    async def _dial(self, group: StreamGroup, other: Endpoint, address: str) -> None:
        try:
            stream = await self._open(other, address)
        except PeerLost as error:
            raise PeerLost(other.island, error.cause) from None
        try:
            await say_hello(stream, self._me, self._auth, group.epoch, to=other)
            group.check_identity(other, self._proved(stream))
        except (MessageError, ConnectionError) as error:
            stream.close()
            if isinstance(error, MessageError):
                self._auth.rejections.add_error(stream.peer, error)
            raise PeerLost(other.island, str(error)) from None
        except BaseException:
            stream.close()
            raise
        group.add_outgoing(other, stream)

    async def _serve(self, guest: Guest, stream: Stream) -> None:
        """Serve one incoming stream. Its payloads go only to the group in its hello."""
        try:
            group, source = await self._match(stream, guest)
        except (MessageError, TimeoutError, ConnectionError) as error:
            if isinstance(error, MessageError):
                await refuse(stream, error, self._auth.rejections)
            log.debug("dropped an incoming stream: %s", error)
            stream.close()
            return
        finally:
            guest.leave()
        await group.receive(source, stream)

    async def _match(self, stream: Stream, guest: Guest) -> tuple[StreamGroup, Endpoint]:
        """Wait for the group of an incoming stream, whose dialer may join before this endpoint.
        Return the group and the dialer.
        """
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                source, epoch = await read_hello(stream, self._me, self._auth)
        except TimeoutError:
            raise RefusedError("silent", "a hello did not arrive in time") from None
        guest.leave()
        if epoch in self._left:
            await say_refusal(stream, f"{self._me} has left this group")
            raise ConnectionResetError("its group was left")
        async with asyncio.timeout(self._connect_seconds):
            with self._park(source.island):
                await self._changed.wait_until(
                    lambda: self._is_closed or self._joined(epoch) is not None
                )
        group = self._joined(epoch)
        if group is None:
            raise ConnectionResetError("it was closed before its group was joined")
        group.check_source(source, self._proved(stream))
        check_access(
            stream, self._auth, source
        )  # its name may have become known since the handshake
        return group, source

    @contextmanager
    def _park(self, island: str) -> Iterator[None]:
        """Count a stream while it waits for its group. Raises RefusedError if too many do."""
        if self._parked.total() >= MAX_PARKED or self._parked[island] >= MAX_PARKED_OF_ISLAND:
            raise RefusedError(
                "streams", f"{self._parked[island]} streams of {island} wait for a group"
            )
        self._parked[island] += 1
        try:
            yield
        finally:
            self._parked[island] -= 1
            self._parked += Counter()  # drops names with a count of 0

    def _joined(self, epoch: str) -> StreamGroup | None:
        return self._group if self._group is not None and self._group.epoch == epoch else None
