"""Random bytes, and valid ones with a few changed, for everything that decodes what a peer has
sent.
"""

import asyncio
import importlib
import json
import pkgutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

pytest.importorskip("hivemind")

import outer
from outer.codecs import _BUILDERS, build_codec
from outer.errors import MessageError, PeerLost
from outer.membership import records
from outer.membership.records import parse_record
from outer.network.endpoints import Endpoint, Kind, Leg, Tag, Traffic
from outer.network.frames import (
    FrameStream,
    Header,
    hash_names,
    pack_header,
    parse_header,
    unpack_call,
)
from outer.network.handshake import Challenge, Hello, Proof, read_hello, say_hello
from outer.network.messages import Message, parse
from outer.network.run_key import PeerAuth, RunKey, seal, unseal
from outer.state.part_state import unpack
from outer.transports.hivemind_addresses import parse_address
from tests.outer.nets import key_of, member

for module in pkgutil.walk_packages(outer.__path__, "outer."):
    importlib.import_module(module.name)


def all_messages(base: type[BaseModel]) -> list[type[BaseModel]]:
    """Every message that is declared somewhere in outer."""
    return [
        m
        for sub in base.__subclasses__()
        for m in (sub, *all_messages(sub))
        if m.__module__.startswith("outer")
    ]


MESSAGES = sorted(all_messages(Message), key=lambda m: (m.__module__, m.__name__))
RECORD_MESSAGES = [m for m in all_messages(BaseModel) if m.__module__ == records.__name__]
KEY = RunKey(b"k" * 32)
RUN = hash_names("run", "control")
A = Endpoint("a", 0)
PEER_ID = "12D3KooWBwgvuKTmfupyVkL18t78A1kTvu9HtfSfwbs1iUCnSVyL"
NESTED = b"[" * 20_000

often = settings(derandomize=True, max_examples=150, deadline=None, database=None)
seldom = settings(often, max_examples=40)

jsons: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["a", "0123456789abcdef", "yes", "no"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def bodies(model: type[BaseModel]) -> st.SearchStrategy[bytes]:
    """Random bytes, and JSON objects with the message's own keys."""
    objects = st.fixed_dictionaries({}, optional=dict.fromkeys(model.model_fields, jsons))
    return (
        st.binary(max_size=200)
        | objects.map(lambda value: json.dumps(value).encode())
        | st.just(NESTED)
    )


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid bytes, some of them changed, and cut or lengthened."""
    raw = bytearray(valid)
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return (
        bytes(raw[: draw(st.integers(0, len(raw)))])
        if draw(st.booleans())
        else bytes(raw) + draw(st.binary(max_size=9))
    )


def random_or_damaged(valid: bytes) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=200) | damaged(valid)


HEADER = pack_header(Header(Kind.PAYLOAD, 2, Tag(7, 1, Leg.GATHER, 5), 9, 1000), RUN)


def frame(kind: Kind, message: Message) -> bytes:
    body = message.encode()
    return pack_header(Header(kind, 0, num_bytes=len(body)), RUN) + body


ITS_HELLO = Hello(island="b", group="1", key=key_of("b").public, share="2" * 64, has_run_key=True)
ITS_PROOF = Proof(signature="0" * 128, mac="0" * 64)
HELLO, PROOF = frame(Kind.HELLO, ITS_HELLO), frame(Kind.PROOF, ITS_PROOF)
CHALLENGE = frame(Kind.CHALLENGE, Challenge(hello=ITS_HELLO, proof=ITS_PROOF))
MEMBER = member("a").model_dump_json().encode()
_RELAYED = f"/ip4/1.2.3.4/tcp/9/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}"
ADDRESS = f"{PEER_ID}:0@/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID};{_RELAYED}"


def test_every_kind_of_message_is_fuzzed():
    assert {"Ready", "Plan", "Vote", "Status", "OutcomeQuery", "Position"} <= {
        m.__name__ for m in MESSAGES
    }
    assert RECORD_MESSAGES


@pytest.mark.parametrize("model", MESSAGES, ids=lambda m: m.__name__)
def test_a_message_is_parsed_or_refused(model):
    @seldom
    @given(bodies(model))
    def fuzz(body: bytes) -> None:
        with suppress(MessageError):
            assert isinstance(parse(model, body), model)

    fuzz()


@pytest.mark.parametrize("model", RECORD_MESSAGES, ids=lambda m: m.__name__)
def test_a_message_of_a_rendezvous_is_parsed_or_refused(model):
    @seldom
    @given(bodies(model))
    def fuzz(body: bytes) -> None:
        with suppress(MessageError):
            assert isinstance(parse(model, body), model)

    fuzz()


@often
@given(random_or_damaged(HEADER))
def test_a_header_is_parsed_or_refused(raw):
    with suppress(MessageError):
        assert parse_header(raw, RUN, 2000).num_bytes <= 2000


@often
@given(random_or_damaged(b"\x04echo" + b"body"))
def test_a_call_is_unpacked_or_refused(raw):
    with suppress(MessageError):
        kind, body = unpack_call(raw)
        assert raw.endswith(kind.encode() + body)


@often
@given(random_or_damaged(MEMBER) | bodies(records.Member))
@example(MEMBER)
def test_a_record_is_parsed_or_left_out(raw):
    parsed = parse_record("a", raw)
    assert parsed is None or parsed.island == "a"


@often
@given(random_or_damaged(seal(KEY, "members/a", MEMBER)), st.sampled_from([KEY, None]))
def test_a_sealed_record_opens_or_is_refused(raw, key):
    with suppress(MessageError):
        assert unseal(key, "members/a", raw) == (MEMBER if key else raw)


@often
@given(
    random_or_damaged(ADDRESS.encode()).map(lambda raw: raw.decode(errors="replace"))
    | st.text(max_size=100)
)
@example(ADDRESS)
@example(f"{PEER_ID}:0@/p2p-circuit")
@example(f"{PEER_ID}:0@/ip4/1.2.3.4/tcp/9/p2p-circuit")
@example(f"{PEER_ID}:{'9' * 5000}@")
def test_an_address_is_parsed_or_a_lost_peer(text):
    with suppress(PeerLost):
        assert parse_address(text).rank is not None


@pytest.mark.parametrize("name", sorted(_BUILDERS))
def test_a_codec_decodes_or_refuses(name):
    codec = build_codec(name)
    valid = bytes(codec.encode(torch.linspace(-1, 1, 300)).numpy())

    @seldom
    @given(
        random_or_damaged(valid) | st.binary(min_size=len(valid), max_size=len(valid)),
        st.sampled_from([0, 1, 300]),
    )
    def fuzz(raw: bytes, num_elements: int) -> None:
        with suppress(MessageError):
            payload = (
                torch.frombuffer(bytearray(raw), dtype=torch.uint8)
                if raw
                else torch.empty(0, dtype=torch.uint8)
            )
            values = codec.decode(payload, num_elements)
            assert values.shape == (num_elements,)

    fuzz()


@often
@given(random_or_damaged(b'{"round":3,"tokens":7}\n' + bytes(40)), st.sampled_from([0, 5]))
def test_a_parts_state_is_unpacked_or_refused(raw, num_elements):
    with suppress(MessageError):
        _, part = unpack(raw, num_elements)
        assert part.params.shape == part.momentum.shape == (num_elements,)
        assert torch.isfinite(part.params).all()


@seldom
@given(random_or_damaged(HELLO + PROOF), st.sampled_from([KEY, None]))
def test_a_dialer_is_met_or_refused(raw, key):
    feed(raw, lambda stream: read_hello(stream, A, PeerAuth(key)))


@seldom
@given(random_or_damaged(CHALLENGE))
def test_an_acceptor_is_met_or_refused(raw):
    feed(raw, lambda stream: say_hello(stream, A, PeerAuth(KEY)))


def feed(raw: bytes, meet: Callable[[FrameStream], Awaitable[Any]]) -> None:
    """Let one side of a handshake hear `raw` and then the end; nobody gets through without a fresh
    proof.
    """

    async def main() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        with suppress(MessageError, ConnectionError):
            await meet(FrameStream(reader, writer, RUN, Traffic()))
            raise AssertionError("it got through")
        writer.close()
        server.close()

    asyncio.run(main())
