"""A transport over libp2p streams: encrypted, through NAT, with separate streams for each ordered
pair of endpoints.
"""

import asyncio

from outer.network.endpoints import Endpoint, Traffic
from outer.network.frames import FrameStream, PeerIds, hash_names
from outer.network.handshake import Stream
from outer.transports.hivemind_addresses import parse_address
from outer.transports.hivemind_daemon import Daemon, stream_name
from outer.transports.streams import StreamTransport

MAX_STREAMS = 16
"""Number of an endpoint's streams in each direction, divided among the group (at least one per
other endpoint).

libp2p allows a quarter of a megabyte in flight per stream, and its window updates share a
connection with the payloads of the other direction, so one stream does not fill a link.
"""


class HivemindTransport(StreamTransport):
    """A Transport (outer.transports.base) over libp2p. Endpoints prove their libp2p peer ids."""

    def __init__(self, daemon: Daemon, run_id: str, me: Endpoint, connect_seconds: float) -> None:
        super().__init__(me, daemon.auth, Traffic(), str(daemon.address), connect_seconds)
        self._daemon = daemon
        self._run_id = run_id
        self._run = hash_names(run_id, "bulk")

    async def open(self) -> None:
        """Accept streams from peers. Call this once, before the address is published."""
        await self._daemon.serve(stream_name(self._run_id, "bulk", self._me.rank), self._accept)

    def _identify(self, other: Endpoint, address: str) -> str:
        return parse_address(address).peer_id

    def _proved(self, stream: Stream) -> str:
        assert stream.peer_ids is not None, "libp2p proves the ends of its streams"
        return stream.peer_ids.other

    def _count_streams(self, num_endpoints: int) -> tuple[int, int, int]:
        # All endpoints have the same addresses, so they compute the same number of streams.
        number = max(MAX_STREAMS // num_endpoints, 1)
        return number, number, number

    async def _open(self, other: Endpoint, address: str) -> Stream:
        place = parse_address(address)
        reader, writer = await self._daemon.open_stream(
            place, stream_name(self._run_id, "bulk", place.rank)
        )
        return self._stream(reader, writer, place.peer_id)

    async def _accept(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        stream = self._stream(reader, writer, peer_id)
        # Another island's stream must not wait behind the streams of a stranger, who may have many
        # peer ids.
        await self._serve(self._guests.enter(peer_id, stream.close), stream)

    def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str
    ) -> FrameStream:
        stream = FrameStream(
            reader, writer, self._run, self.traffic, PeerIds(self._daemon.peer_id, peer_id)
        )
        stream.peer = peer_id
        return stream
