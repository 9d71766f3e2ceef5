import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from outer.connect.settings import Network
from outer.errors import DeadlineError, InputError, MessageError, PeerLost
from outer.network import rpc as calls
from outer.network.endpoints import Endpoint, Kind, Traffic
from outer.network.frames import HEADER_BYTES, FrameStream, Header, hash_names, pack_header
from outer.network.handshake import Hello, say_hello
from outer.network.run_key import PeerAuth
from tests.outer.nets import KINDS, A, B, key_of, run, swarm, with_two

all_kinds = pytest.mark.parametrize("kind", KINDS)
B1 = Endpoint("b", 1)


async def call(
    caller: Network, callee: Network, kind: str, body: bytes, seconds: float = 10
) -> bytes:
    return await caller.messenger.call(
        callee.messenger.address, kind, body, timeout_seconds=seconds
    )


def with_stranger(
    test: Callable[
        [Network, asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]
    ],
) -> None:
    """Run a test with island a and a plain connection to the socket at which it answers calls."""

    async def main() -> None:
        async with swarm("gloo") as place:
            a = await place.open(A)
            host, _, port = a.messenger.address.partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            await test(a, reader, writer)
            writer.close()

    run(main())


async def echo(source: Endpoint, body: bytes) -> bytes:
    return body[::-1]


@all_kinds
def test_a_call_is_answered(kind):
    async def test(a: Network, b: Network) -> None:
        b.messenger.serve("echo", echo)
        for body in (b"", b"xyz", bytes(range(256)) * (1 << 14)):
            reply = await call(a, b, "echo", body)
            assert reply == body[::-1]

    with_two(kind, test)


@all_kinds
def test_every_rank_of_an_island_answers_its_own_calls(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b0, b1 = await place.open(A), await place.open(B), await place.open(B1)
            for network, name in ((b0, b"0"), (b1, b"1")):
                network.messenger.serve(
                    "rank", lambda source, body, name=name: _answer(source, name)
                )
            calls_ = [call(a, n, "rank", b"") for n in (b0, b1)]
            assert await asyncio.gather(*calls_) == [b"0", b"1"]

    run(main())


@all_kinds
def test_replies_find_their_calls_when_they_come_out_of_order(kind):
    async def test(a: Network, b: Network) -> None:
        second_came = asyncio.Event()

        async def handler(source: Endpoint, body: bytes) -> bytes:
            if body == b"first":
                await second_came.wait()
            second_came.set()
            return body

        b.messenger.serve("wait", handler)
        bodies = [b"first", b"second"]
        replies = [call(a, b, "wait", body) for body in bodies]
        assert await asyncio.gather(*replies) == bodies

    with_two(kind, test)


@all_kinds
def test_a_refusal_comes_back_with_its_text(kind):
    async def test(a: Network, b: Network) -> None:

        async def refuse(source: Endpoint, body: bytes) -> bytes:
            raise {b"1": MessageError, b"2": InputError}[body]("round 7 is over")

        b.messenger.serve("refuse", refuse)
        b.messenger.serve("echo", echo)
        for body in (b"1", b"2"):
            with pytest.raises(MessageError, match="round 7 is over"):
                await call(a, b, "refuse", body)
        assert await call(a, b, "echo", b"ab") == b"ba"

    with_two(kind, test)


@all_kinds
def test_a_broken_handler_is_a_refusal_that_tells_nothing_more(kind):
    async def test(a: Network, b: Network) -> None:

        async def broken(source: Endpoint, body: bytes) -> bytes:
            raise KeyError("secret")

        b.messenger.serve("broken", broken)
        with pytest.raises(MessageError, match="the handler of 'broken' failed") as caught:
            await call(a, b, "broken", b"")
        assert "secret" not in str(caught.value)

    with_two(kind, test)


@all_kinds
def test_a_call_that_nothing_answers_is_refused(kind):
    async def test(a: Network, b: Network) -> None:
        with pytest.raises(MessageError, match="nothing here answers 'what'"):
            await call(a, b, "what", b"")

    with_two(kind, test)


@all_kinds
def test_an_oversized_call_or_reply_is_refused(kind, monkeypatch):
    monkeypatch.setattr("outer.network.messages.MAX_REPLY_BYTES", 1000)
    monkeypatch.setattr(calls, "MAX_CALL_BYTES", 1000)
    monkeypatch.setattr("outer.membership.loopback.MAX_CALL_BYTES", 1000)

    async def test(a: Network, b: Network) -> None:
        b.messenger.serve("long", lambda source, body: _answer(source, bytes(1001)))
        with pytest.raises(MessageError, match="at most 1000"):
            await call(a, b, "long", bytes(1001))
        with pytest.raises(MessageError, match="at most 1000"):
            await call(a, b, "long", b"")

    with_two(kind, test)


@all_kinds
def test_a_slow_handler_is_a_deadline_error_and_the_connection_lives_on(kind):
    async def test(a: Network, b: Network) -> None:
        never = asyncio.Event()

        async def slow(source: Endpoint, body: bytes) -> bytes:
            await never.wait()
            return body

        b.messenger.serve("slow", slow)
        b.messenger.serve("echo", echo)
        with pytest.raises(DeadlineError, match=r"did not answer 'slow' within 0\.2 s"):
            await call(a, b, "slow", b"", seconds=0.2)
        assert await call(a, b, "echo", b"ab") == b"ba"

    with_two(kind, test)


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        ("loopback", "loopback:run/b/0"),
        ("gloo", "127.0.0.1:1"),
        ("gloo", "nonsense"),
        ("hivemind", "12D3KooWBwgvuKTmfupyVkL18t78A1kTvu9HtfSfwbs1iUCnSVyL:0@/ip4/127.0.0.1/tcp/1"),
        ("hivemind", "nonsense"),
    ],
)
def test_an_address_that_cannot_be_reached_is_a_lost_peer(kind, address):
    async def main() -> None:
        async with swarm(kind) as place:
            a = await place.open(A)
            with pytest.raises(PeerLost):
                await a.messenger.call(address, "echo", b"", timeout_seconds=10)

    run(main())


@pytest.mark.parametrize("is_heard", [False, True], ids=["silent", "heard"])
def test_who_does_not_answer_is_dialled_anew_for_bulk_too_unless_something_came_there(
    is_heard: bool,
):
    async def test(a: Network, b: Network) -> None:
        async def hang(source: Endpoint, body: bytes) -> bytes:
            began.set()
            await asyncio.sleep(60)
            return b""

        async def fetch() -> object:
            await a.messenger.call(address, "echo", b"x", timeout_seconds=10, lane="bulk")
            return a.messenger._outgoing[address, "bulk"]  # pyright: ignore[reportAttributeAccessIssue]

        address, began = b.messenger.address, asyncio.Event()
        b.messenger.serve("echo", echo)
        b.messenger.serve("hang", hang)
        connection = await fetch()
        waiting = asyncio.create_task(call(a, b, "hang", b"", seconds=1))
        await began.wait()
        if is_heard:
            await fetch()
        with pytest.raises(DeadlineError):
            await waiting
        assert (await fetch() is connection) == is_heard

    with_two("tls", test)


@all_kinds
def test_a_peer_that_closes_in_the_middle_of_a_call_is_lost(kind):
    async def test(a: Network, b: Network) -> None:
        called = asyncio.Event()

        async def hang(source: Endpoint, body: bytes) -> bytes:
            called.set()
            await asyncio.Event().wait()
            return body

        b.messenger.serve("hang", hang)
        calling = asyncio.create_task(call(a, b, "hang", b"", seconds=20))
        await asyncio.wait_for(called.wait(), 10)
        await b.close()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(calling, 5)
        with pytest.raises(PeerLost):
            await call(a, b, "hang", b"", seconds=5)

    with_two(kind, test)


@pytest.mark.parametrize("kind", ["gloo", "hivemind"])
def test_calls_of_another_run_are_not_answered(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.open(A), await place.open(B, run_id="another")
            b.messenger.serve("echo", echo)
            with pytest.raises(PeerLost):
                await call(a, b, "echo", b"", seconds=5)

    run(main())


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(100), b"DLCX" + bytes(100)])
def test_a_stranger_that_talks_nonsense_is_dropped(raw):
    async def test(a: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        assert await _read_to_end(reader) == b""

    with_stranger(test)


@pytest.mark.parametrize("message", [b"", b"\x05ab", b"\x02\xff\xff"])
def test_a_malformed_call_ends_its_connection(message):
    async def test(a: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = FrameStream(reader, writer, hash_names("run", "control"), Traffic())
        await say_hello(stream, B, PeerAuth())
        await stream.write(Header(Kind.CALL, num_bytes=len(message)), message)
        assert await _read_to_end(reader) == b""

    with_stranger(test)


RUN = hash_names("run", "control")
WORDS = Hello(island="b", key=key_of("b").public, share="2" * 64, has_run_key=False).encode()
HELLO = pack_header(Header(Kind.HELLO, 0, num_bytes=len(WORDS)), RUN) + WORDS


@pytest.mark.parametrize(
    ("raw", "peer", "kind", "text"),
    [
        (bytes(HEADER_BYTES), "127.0.0.1", "header", "not a frame of diloco: it begins with 0000"),
        (
            b"DLCO\x01" + HELLO[5:],
            "127.0.0.1",
            "version",
            "a frame of version 1, and this island speaks version 12",
        ),
        (HELLO[:6] + bytes(8) + HELLO[14:], "127.0.0.1", "run", "another run"),
        (HELLO.replace(b'"b"', b'"/"'), "127.0.0.1", "header", "not a Hello: island"),
        (
            pack_header(Header(Kind.HELLO, 0, num_bytes=2000), RUN) + bytes(2000),
            "127.0.0.1",
            "size",
            "2000 bytes, at",
        ),
        (
            pack_header(Header(Kind.CALL, 0), RUN),
            "127.0.0.1",
            "header",
            "begins with CALL, HELLO expected",
        ),
        (HELLO, "b/0 at 127.0.0.1", "none", ""),
        (HELLO + b"DLCO", "b/0 at 127.0.0.1", "truncated", "within a header"),
        (HELLO[:-1], "127.0.0.1", "truncated", "within a frame"),
        (HELLO + HELLO, "b/0 at 127.0.0.1", "key", "answers a challenge with HELLO"),
        (HELLO.replace(b"2" * 64, b"0" * 64), "b/0 at 127.0.0.1", "key", "weak share"),
    ],
)
def test_what_is_refused_is_counted_with_peer_and_reason(raw, peer, kind, text):
    async def test(a: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        writer.write_eof()
        await _read_to_end(reader)
        expected = [] if kind == "none" else [(peer, kind, 1)]
        found = a.rejections.drain()
        assert [(its_peer, its_kind, count) for its_peer, its_kind, _, count in found] == expected
        assert all(text in its_text for _, _, its_text, _ in found)

    with_stranger(test)


@pytest.mark.parametrize(
    ("raw", "kind", "text"),
    [
        (b"DLCO", "truncated", "within a header"),
        (
            pack_header(Header(Kind.CALL, num_bytes=1 << 40), RUN),
            "size",
            "1099511627776 bytes, at most",
        ),
        (
            pack_header(Header(Kind.CALL, num_bytes=2), RUN) + b"\x01a" + bytes(16),
            "forged",
            "altered",
        ),
    ],
)
def test_what_is_refused_after_the_handshake_is_counted_with_peer_and_reason(raw, kind, text):
    async def test(a: Network, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await say_hello(FrameStream(reader, writer, RUN, Traffic()), B, PeerAuth())
        writer.write(raw)
        writer.write_eof()
        await _read_to_end(reader)
        ((its_peer, its_kind, its_text, count),) = a.rejections.drain()
        assert (its_peer, its_kind, count) == ("b/0 at 127.0.0.1", kind, 1)
        assert text in its_text

    with_stranger(test)


@pytest.mark.parametrize("kind", ["gloo", "hivemind"])
def test_calls_that_are_refused_are_counted_with_the_caller(kind):
    async def test(a: Network, b: Network) -> None:

        async def refuse(source: Endpoint, body: bytes) -> bytes:
            raise MessageError("round 7 is over")

        b.messenger.serve("refuse", refuse)
        for name in ("refuse", "what"):
            with pytest.raises(MessageError):
                await call(a, b, name, b"")
        assert b.rejections.drain() == [
            ("a/0", "call", "refuse: round 7 is over", 1),
            ("a/0", "unknown", "nothing here answers 'what'", 1),
        ]

    with_two(kind, test)


def test_a_caller_of_another_run_is_told_so():
    async def main() -> None:
        async with swarm("gloo") as place:
            a, b = await place.open(A), await place.open(B, run_id="another")
            with pytest.raises(PeerLost, match="a frame of another run"):
                await call(a, b, "echo", b"", seconds=5)

    run(main())


def test_connections_beyond_the_limit_are_counted(monkeypatch):
    async def test(a: Network, b: Network) -> None:
        monkeypatch.setattr("outer.network.rejections.MAX_CONNECTIONS", 0)
        with pytest.raises(PeerLost):
            await call(a, b, "echo", b"", seconds=5)
        assert [(kind, count) for _, kind, _, count in b.rejections.drain()] == [("streams", 1)]

    with_two("gloo", test)


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return b""


async def _answer(source: Endpoint, body: bytes) -> bytes:
    return body
