"""Addresses of peers and of users that are malformed, unreachable or not safe to listen on."""

import pytest

from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.errors import InputError, PeerLost
from tests.outer.nets import A, B, connect, run, swarm


def test_a_gloo_endpoint_is_reached_at_its_announced_host():
    async def main() -> None:
        async with swarm("gloo") as place:
            a = await open_network(
                "gloo",
                NetworkSettings(
                    "run", "a", 0, place.bootstrap, announce_host="localhost", connect_seconds=10
                ),
            )
            b = await place.open(B)
            assert a.transport.address.startswith("gloo:a/0@localhost:")
            await connect({A: a, B: b}, "1")
            await a.close()

    run(main())


MALFORMED_ADDRESSES = [
    "",
    "gloo:",
    "gloo:a/0@h",
    "gloo:b/0@h:1",
    "gloo:a/1@h:1",
    "gloo:a/0@h:0",
    "gloo:a/0@h:65536",
]


@pytest.mark.parametrize(
    "text", [*MALFORMED_ADDRESSES, "gloo:a/0@:1", "gloo:a/0@h h:1", "x" * 9999, "gloo:a/0@h:1\n"]
)
def test_a_malformed_gloo_address_is_a_lost_peer(text):
    async def main() -> None:
        async with swarm("gloo") as place:
            b = await place.open(B)
            with pytest.raises(PeerLost, match="malformed address of a/0"):
                await b.transport.connect("1", {A: text, B: b.transport.address})

    run(main())


@pytest.mark.parametrize(
    "text", ["", "x", "Qm:0@", "a" * 5000, "12D3KooW:0@/ip4/1.2.3.4", "\u0000:1@/tcp"]
)
def test_a_malformed_peer_address_is_a_lost_peer(text):
    pytest.importorskip("hivemind")
    from outer.transports.hivemind_addresses import parse_address

    with pytest.raises(PeerLost, match="malformed"):
        parse_address(text)


def test_an_unknown_transport_lists_the_choices():
    with pytest.raises(InputError, match="loopback, gloo, tls, hivemind"):
        run(open_network("carrier-pigeon", NetworkSettings("run", "a", 0)))


def test_gloo_refuses_to_listen_on_every_address():
    with pytest.raises(InputError, match=r"0\.0\.0\.0.*not encrypted"):
        settings = NetworkSettings("run", "a", 0, ["tcp://127.0.0.1:1"], listen_host="0.0.0.0")
        run(open_network("gloo", settings))


@pytest.mark.parametrize(
    ("kind", "bootstrap"),
    [
        ("gloo", "tcp://127.0.0.1:1"),
        (
            "hivemind",
            "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBwgvuKTmfupyVkL18t78A1kTvu9HtfSfwbs1iUCnSVyL",
        ),
    ],
)
def test_an_unreachable_bootstrap_address_is_named_with_the_time_tried(kind, bootstrap):
    with pytest.raises(InputError, match=rf"{bootstrap}.* within .* s|within .* s: {bootstrap}"):
        run(open_network(kind, NetworkSettings("run", "a", 0, [bootstrap], connect_seconds=1)))


@pytest.mark.parametrize(
    ("kind", "bootstrap"),
    [
        ("gloo", []),
        ("gloo", ["127.0.0.1:80"]),
        ("hivemind", ["nonsense"]),
        ("hivemind", ["/ip4/127.0.0.1/tcp/1"]),
    ],
)
def test_a_bootstrap_address_of_the_wrong_form_says_what_is_right(kind, bootstrap):
    with pytest.raises(InputError, match=r"island.bootstrap: .*(tcp://HOST:PORT|/ip4/)"):
        run(open_network(kind, NetworkSettings("run", "a", 0, bootstrap, connect_seconds=1)))
