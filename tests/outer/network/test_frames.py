import asyncio
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outer.errors import MessageError
from outer.network.endpoints import Endpoint, Kind, Leg, Tag, Traffic
from outer.network.frames import (
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    FrameStream,
    Header,
    hash_names,
    pack_header,
    parse_header,
    view_of,
)
from outer.network.handshake import read_hello, say_hello
from outer.network.run_key import PeerAuth

RUN = hash_names("run", "bulk")
HEADER = Header(Kind.PAYLOAD, 2, Tag(7, 1, Leg.GATHER, 5), 9, 1000)

headers = st.builds(
    Header,
    st.sampled_from(Kind),
    st.integers(0, 2**16 - 1),
    st.builds(
        Tag,
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.sampled_from(Leg),
        st.integers(0, 2**32 - 1),
    ),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)


@given(headers)
def test_a_header_survives_packing(header):
    assert parse_header(pack_header(header, RUN), RUN, 2**64) == header


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_refused(raw):
    with pytest.raises(MessageError):
        parse_header(raw, RUN, 2**64)


@given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_still_a_header(header, index, change):
    raw = bytearray(pack_header(header, RUN))
    raw[index] ^= change
    with suppress(MessageError):
        assert parse_header(bytes(raw), RUN, 2**64) != header


def test_a_frame_of_another_run_is_refused():
    with pytest.raises(MessageError, match="another run"):
        parse_header(pack_header(HEADER, hash_names("other", "bulk")), RUN, 2000)


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(MessageError, match="1000 bytes, at most 999"):
        parse_header(pack_header(HEADER, RUN), RUN, 999)


@given(st.binary(max_size=200))
def test_a_stream_of_random_bytes_ends_in_a_message_or_connection_error(raw):
    async def main() -> None:
        stream, reader, _ = await _stream()
        reader.feed_data(raw)
        reader.feed_eof()
        with pytest.raises((MessageError, ConnectionError)):
            await read_hello(stream, Endpoint("b", 0), PeerAuth())
        with pytest.raises((MessageError, ConnectionError)):
            while True:
                await stream.read(1 << 20)

    asyncio.run(main())


@given(st.integers(0, HEADER_BYTES + 999))
def test_a_truncated_frame_is_a_connection_error(length):
    async def main() -> None:
        stream, reader, _ = await _stream()
        reader.feed_data((pack_header(HEADER, RUN) + bytes(1000))[:length])
        reader.feed_eof()
        with pytest.raises(ConnectionError):
            await stream.read(1000)

    asyncio.run(main())


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 20])
def test_a_frame_arrives_as_it_was_sent_and_both_sides_count_it(num_bytes):
    async def main() -> None:
        sent, received = Traffic(), Traffic()
        payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        arrived: asyncio.Future = asyncio.get_running_loop().create_future()

        async def accept(reader, writer):
            stream = FrameStream(reader, writer, RUN, received)
            arrived.set_result(
                (
                    await read_hello(stream, Endpoint("b", 0), PeerAuth()),
                    await stream.read(num_bytes),
                )
            )
            stream.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        stream = FrameStream(reader, writer, RUN, sent)
        await say_hello(stream, Endpoint("a", 3), PeerAuth(), "epoch")
        header = Header(Kind.PAYLOAD, 3, HEADER.tag, num_bytes=num_bytes)
        await stream.write(header, view_of(payload))
        hello, (got, body) = await asyncio.wait_for(arrived, 10)
        assert hello == (Endpoint("a", 3), "epoch")
        assert got == header
        assert torch.equal(body, payload)
        assert sent.bytes_sent == received.bytes_received
        assert 0 < sent.bytes_sent - num_bytes - 3 * HEADER_BYTES < 2 * MAX_HELLO_BYTES
        stream.close()
        server.close()

    asyncio.run(main())


def test_a_payload_of_another_dtype_is_refused():
    with pytest.raises(ValueError, match="1-D contiguous uint8"):
        view_of(torch.zeros(3))


async def _stream() -> tuple[FrameStream, asyncio.StreamReader, asyncio.Server]:
    """A stream whose reader the test feeds."""
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    reader = asyncio.StreamReader()
    return FrameStream(reader, writer, RUN, Traffic()), reader, server
