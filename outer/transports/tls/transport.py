"""A transport over TLS 1.3 on connections of our own, for islands that reach each other over the
open internet.
"""

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence

import torch

from outer.config import MAX_TLS_STREAMS
from outer.errors import MessageError, PeerLost, TransportError
from outer.identity.tls import TlsIdentity
from outer.network.endpoints import Endpoint, Tag, Traffic
from outer.network.event_loop import Tasks, WaitingThreads
from outer.network.frames import hash_names
from outer.network.handshake import Stream
from outer.network.run_key import PeerAuth
from outer.routes.addresses import Route, parse_island_address
from outer.routes.dialer import Dialer
from outer.routes.sockets import Listener, find_host
from outer.space.buffers import BUFFERS
from outer.transports.gloo.open_files import allow_many_files
from outer.transports.stream_group import StreamGroup
from outer.transports.streams import HELLO_SECONDS, StreamTransport
from outer.transports.tls.addresses import build_address, parse_address
from outer.transports.tls.stream import StreamOwner, TlsStream

log = logging.getLogger(__name__)

RENEW_BYTES = 1 << 23
"""A connection that has carried fewer bytes is not renewed: its rate has hardly adapted, and a
new one costs some round trips."""


class TlsTransport(StreamTransport):
    """A Transport (outer.transports.base) over TLS. Endpoints prove their islands' keys."""

    def __init__(
        self,
        run_id: str,
        me: Endpoint,
        auth: PeerAuth,
        tls: TlsIdentity,
        traffic: Traffic,
        connect_seconds: float,
        num_streams: int = 1,
        dialer: Dialer | None = None,
    ) -> None:
        """Create a transport. `num_streams`: number of streams to each other endpoint, which may
        choose another number.
        """
        super().__init__(me, auth, traffic, "", connect_seconds)
        self._dialer = dialer or Dialer()
        self._num_streams = num_streams
        self._round = -1
        self._addresses: Mapping[Endpoint, str] = {}
        self._threads = WaitingThreads()
        self._sizes = set[int]()
        self._owner = StreamOwner(
            tls, hash_names(run_id, "bulk"), traffic, self._threads, self._allocate
        )
        self._listener = Listener(self._accept)
        self._renewals = Tasks()

    async def open(
        self, host: str, port: int, announced_host: str | None, relays: Sequence[Route] = ()
    ) -> None:
        """Accept connections on a host and port (0: any free port). Call this once. Raises OSError.

        `announced_host` and `relays` are announced to other islands. The relays' connections are
        passed to `accept`.
        """
        allow_many_files()  # Strangers may connect.
        port = await self._listener.open(host, port)
        key = self._auth.island.public
        self.address = build_address(key, announced_host, port, relays, self._me.rank, "payloads")

    def accept(self, connection: socket.socket) -> None:
        """Serve a connection that another island has dialled through a relay."""
        self._listener.serve(connection)

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        self._addresses = addresses
        await super().connect(epoch, addresses)

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        if tag.round != self._round:
            self._round = tag.round
            self._renew()
        await super().send(to, tag, payload)

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        self._sizes.add(num_bytes)
        return await super().recv(source, tag, num_bytes)

    async def close(self) -> None:
        await super().close()
        await self._renewals.end()
        await self._listener.close()
        self._threads.close()

    def _identify(self, other: Endpoint, address: str) -> str:
        return parse_address(other, address).key

    def _has_spare_route(self, address: str) -> bool:
        return len(parse_island_address(address).routes) > 1

    def _proved(self, stream: Stream) -> str:
        return stream.peer_key

    def _count_streams(self, num_endpoints: int) -> tuple[int, int, int]:
        return self._num_streams, 1, 2 * MAX_TLS_STREAMS  # new streams open before the old ones end

    async def _open(self, other: Endpoint, address: str) -> Stream:
        try:
            connection = await self._dialer.dial(parse_address(other, address))
        except ConnectionError as error:
            raise PeerLost(other.island, f"{other} cannot be reached: {error}") from None
        stream = TlsStream(connection, self._owner, find_host(connection), is_acceptor=False)
        try:
            await stream.handshake()
        except BaseException as error:
            stream.close()
            if not isinstance(error, MessageError | ConnectionError):
                raise
            if isinstance(error, MessageError):
                self._auth.rejections.add_error(stream.peer, error)
            raise PeerLost(other.island, str(error)) from None
        return stream

    async def _dial(self, group: StreamGroup, other: Endpoint, address: str) -> None:
        try:
            await super()._dial(group, other, address)
        except BaseException:  # includes the end of the time limit
            self._dialer.blame(address)
            raise

    def _renew(self) -> None:
        """Replace connections that have carried many bytes, while the first payloads of a round
        travel on them.

        TCP divides a link among connections by their recent rates. The connections that finished
        last in a round get more of it, so old connections share the link unevenly. New connections
        get equal shares.
        """
        group = self._group
        if group is None or len(group.outgoing) < 2:
            return
        for other, streams in group.outgoing.items():
            for stream in streams if other not in group.redial.outgoing else ():
                if isinstance(stream, TlsStream) and stream.bytes_sent >= RENEW_BYTES:
                    self._renewals.start(self._replace(group, other, stream))

    async def _replace(self, group: StreamGroup, other: Endpoint, old: TlsStream) -> None:
        try:
            async with asyncio.timeout(self._connect_seconds):
                await self._dial(group, other, self._addresses[other])
        except (TransportError, TimeoutError) as error:  # the old connection stays in use
            log.debug("no new connection to %s: %s", other, error)
            return
        await group.retire(other, old)

    async def _accept(self, connection: socket.socket, host: str) -> None:
        """Serve one incoming connection. Until it has proved an island's key, it counts as a
        stranger's.
        """
        stream = TlsStream(connection, self._owner, host, is_acceptor=True)
        guest = self._guests.enter(host, stream.close)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await stream.handshake()
            await self._serve(guest, stream)
        except TimeoutError:
            self._auth.rejections.add(host, "silent", "a TLS handshake did not end in time")
        except MessageError as error:
            self._auth.rejections.add_error(host, error)
        except ConnectionError as error:
            log.debug("dropped a connection for payloads: %s", error)
        finally:
            guest.leave()
            stream.close()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory for a payload. Only payloads that this endpoint expects use memory that
        is kept for later.
        """
        return (
            BUFFERS.bytes(num_bytes)
            if num_bytes in self._sizes
            else torch.empty(num_bytes, dtype=torch.uint8)
        )
