"""Frames, and what streams begin with: handshakes, words with relays and proxies, MACs of
payloads.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from outer.errors import MessageError
from outer.identity.island_key import IslandKey
from outer.network.endpoints import Endpoint, Kind, Leg, Tag
from outer.network.frames import (
    HEADER_BYTES,
    Header,
    pack_header,
    parse_header,
    text_of,
    unpack_call,
)
from outer.network.handshake import (
    Challenge,
    Handshake,
    Hello,
    Proof,
    read_hello,
    refusal_error,
    say_hello,
)
from outer.network.messages import parse
from outer.network.run_key import FrameMacs, PeerAuth, RunKey
from outer.routes import wire
from outer.routes.proxy import Proxy
from outer.transports.stream_group import StreamGroup
from tests.costly_bodies import Bounds
from tests.fuzz.entries import Entries, Entry
from tests.fuzz.loop import LOOP
from tests.fuzz.streams import RUN, Frame, PeerStream, frames_in, on_socket, on_stream, read_all

MOST_BYTES = 2000
RUN_KEY, MAC_KEY = RunKey(b"k" * 32), b"m" * 32
ME, PEER = Endpoint("a", 0), Endpoint("b", 0)
MY_KEY, PEER_KEY = IslandKey(b"a" * 32), IslandKey(b"b" * 32)
EXCHANGE = X25519PrivateKey.from_private_bytes(b"x" * 32)
"""The peer's half of the exchange is always the same, so that it can prove what an input says."""
TAG = Tag(7, 1, Leg.GATHER, 5)
HELLO = Hello(
    island="b",
    group="1",
    key=PEER_KEY.public,
    share=EXCHANGE.public_key().public_bytes_raw().hex(),
    has_run_key=True,
)
NO_PROOF = Proof(signature="0" * 128, mac="0" * 64)
ENDED = (MessageError, ConnectionError)
PROXY_SECONDS = 0.2
"""A proxy's answer is read byte by byte, and others have the event loop between two of them."""


def build_frames() -> Entries:
    """An entry for each thing that is read from a stream before a message is."""
    frames = b"".join(_frame(kind, b"some text") for kind in Kind)
    hello = HELLO.encode()
    challenge = Challenge(hello=HELLO, proof=NO_PROOF).encode()
    return {
        "header": Entry(_decode_header, [pack_header(Header(kind, 2, TAG, 9, 1000),
        RUN) for kind in Kind]),
        "call": Entry(_decode_call, [b"\x04echobody", b"\x00", b"\x04echo"]),
        "refusal": Entry(_decode_refusal, [b"no such island", "caf\u00e9".encode(), b""]),
        "frames": Entry(_decode_frames, [frames, frames[: HEADER_BYTES + 9], b""], ENDED),
        "frames with macs": Entry(_decode_protected, [b"\xff" + frames, b"\x02" + frames], ENDED),
        "payloads": Entry(_decode_payloads, [_payloads(), _frame(Kind.END, b""), frames]),
        "dialer": Entry(
            partial(_meet_dialer, None), [_frame(Kind.HELLO, hello) + _frame(Kind.PROOF,
            NO_PROOF.encode())], ENDED,
            is_refused=True,
        ),
        "acceptor": Entry(
            _meet_acceptor, [_frame(Kind.CHALLENGE, challenge), _frame(Kind.REFUSAL, b"no")], ENDED,
            is_refused=True
        ),
        "dialer that proves": Entry(_meet_proving_dialer, [hello], ENDED, is_json=True),
        "acceptor that proves": Entry(_meet_proving_acceptor, [hello], ENDED, is_json=True),
        "relay": Entry(_decode_relay, list(_relay_words()), (*ENDED, OSError)),
        "http proxy": Entry(
            partial(_ask_proxy, "http"), [b"HTTP/1.1 200 OK\r\nA: b\r\n"
                                          b"\r\n", b"HTTP/1.1 407 No\r\n\r\n"],
            (ConnectionError,), most_seconds=PROXY_SECONDS,
        ),
        "socks proxy": Entry(
            partial(_ask_proxy, "socks5"),
            [b"\x05\x02\x01\x00\x05\x00\x00\x01" + bytes(6),
            b"\x05\x02\x01\x00\x05\x00\x00\x03\x02ab" + bytes(2),
             b"\x05\x02\x01\x00\x05\x05\x00\x01"],
            (ConnectionError,),
        ),
    }  # fmt: skip


def _frame(kind: Kind, payload: bytes, tag: Tag = TAG) -> bytes:
    return pack_header(Header(kind, 0, tag, 9, len(payload)), RUN) + payload


def _payloads() -> bytes:
    return b"".join(
        _frame(Kind.PAYLOAD, bytes([part]) * part, Tag(7, 1, Leg.REDUCE, part)) for part in range(5)
    )


def _decode_header(raw: bytes) -> None:
    header = parse_header(raw, RUN, MOST_BYTES)
    assert header.num_bytes <= MOST_BYTES
    assert pack_header(header, RUN) == raw


def _decode_call(raw: bytes) -> None:
    kind, body = unpack_call(raw)
    assert raw == bytes([len(kind.encode())]) + kind.encode() + body


def _decode_refusal(raw: bytes) -> None:
    payload = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
    assert str(refusal_error(payload)).isprintable()
    assert text_of(payload).encode() == raw


def _decode_frames(raw: bytes) -> None:
    found = on_stream(raw, lambda stream: read_all(stream, MOST_BYTES))
    assert b"".join(pack_header(header, RUN) + payload for header, payload in found) == raw


def _decode_protected(body: bytes) -> None:
    """Frames with the right MACs, but for the one whose number the first byte says."""
    damaged, macs, sent, frames = body[0] if body else 255, FrameMacs(MAC_KEY), b"", []
    for number, frame in enumerate(frames_in(body[1:], MOST_BYTES)):
        mac = macs.begin()
        mac.update(frame)
        sent += frame + (bytes(16) if number == damaged else mac.digest())
        frames.append(frame)

    async def read(stream: "object") -> list[Frame]:
        stream.use_macs(FrameMacs(MAC_KEY), FrameMacs(MAC_KEY))  # type: ignore[attr-defined]
        return await read_all(stream, MOST_BYTES)  # type: ignore[arg-type]

    found = on_stream(sent, read)
    assert [pack_header(header, RUN) + payload for header, payload in found] == frames
    assert damaged >= len(frames), "a frame with a wrong MAC was read"


def _decode_payloads(raw: bytes) -> None:
    """What a participant of a round sends on its stream."""

    async def receive(stream: "object") -> None:
        auth = PeerAuth(island=MY_KEY)
        group = StreamGroup("1", {PEER: ""}, auth, MOST_BYTES, 1, 1, 2)
        stream.peer_key = PEER_KEY.public  # type: ignore[attr-defined]
        await group.receive(PEER, stream)  # type: ignore[arg-type]
        group.close()

    on_stream(raw, receive)


def _meet_dialer(key: RunKey | None, raw: bytes) -> None:
    on_stream(raw, lambda stream: read_hello(stream, ME, PeerAuth(key, island=MY_KEY)))


def _meet_acceptor(raw: bytes) -> None:
    on_stream(raw, lambda stream: say_hello(stream, ME, PeerAuth(RUN_KEY, island=MY_KEY)))


def _meet_proving_dialer(body: bytes) -> None:
    """Somebody who says this hello, and proves it if it is a dialer's with the peer's own share."""

    def answer(heard: list[Frame]) -> Iterator[Frame]:
        yield Header(Kind.HELLO), body
        challenge = parse(Challenge, heard[-1][1])
        theirs, ours = parse(Hello, body), challenge.hello
        yield Header(Kind.PROOF), _prove(theirs, ours, is_dialer=True)

    stream = PeerStream(answer)
    dialer, group = LOOP.run_until_complete(
        read_hello(stream, ME, PeerAuth(RUN_KEY, island=MY_KEY))
    )
    hello = parse(Hello, body)
    assert (dialer.island, group, stream.peer_key) == (hello.island, hello.group, PEER_KEY.public)


def _meet_proving_acceptor(body: bytes) -> None:
    """Somebody who answers with this hello, and proves it if it is an acceptor's with the peer's
    own share.
    """

    def answer(heard: list[Frame]) -> Iterator[Frame]:
        ours = parse(Hello, heard[-1][1])
        proof = NO_PROOF.encode()
        with suppress(MessageError):
            proof = _prove(ours, parse(Hello, body), is_dialer=False)
        yield Header(Kind.CHALLENGE), b'{"hello":' + body + b',"proof":' + proof + b"}"

    stream = PeerStream(answer)
    acceptor = LOOP.run_until_complete(say_hello(stream, ME, PeerAuth(RUN_KEY, island=MY_KEY)))
    assert (acceptor.island, stream.peer_key) == (parse(Hello, body).island, PEER_KEY.public)


def _prove(dialer: Hello, acceptor: Hello, *, is_dialer: bool) -> bytes:
    """The proof of the peer. Raises MessageError if the other side's share is weak."""
    ends = (Endpoint(dialer.island, 0), Endpoint(acceptor.island, 0))
    handshake = Handshake(RUN_KEY, RUN, *ends, dialer, acceptor, None)
    keys = handshake.derive(EXCHANGE, acceptor.share if is_dialer else dialer.share)
    return keys.prove(
        "dialer" if is_dialer else "acceptor", PeerAuth(RUN_KEY, island=PEER_KEY)
    ).encode()


def _relay_words() -> Iterator[bytes]:
    """One word of each kind, as it is sent."""
    for number, model in enumerate(wire.KINDS):
        bounds = Bounds(model)
        body = bounds.smallest(bounds.root).encode()
        yield wire._HEADER.pack(wire.MAGIC, wire.VERSION, number, len(body)) + body


def _decode_relay(raw: bytes) -> None:
    on_socket(raw, lambda connection: wire.receive(connection, *wire.KINDS))


def _ask_proxy(kind: str, raw: bytes) -> None:
    proxy = Proxy(kind, "proxy", 1, "user", "password")  # type: ignore[arg-type]
    on_socket(raw, lambda connection: proxy.ask(connection, "host", 1))
