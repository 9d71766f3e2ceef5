"""Addresses over TLS: their text, what is malformed, and what a user may give as a relay or leave
out.
"""

import pytest

from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.errors import InputError, MessageError
from outer.routes.addresses import (
    IslandAddress,
    RelayTarget,
    Route,
    find_key,
    parse_island_address,
    parse_relays,
)
from outer.transports.tls.addresses import build_address, choose_announced_host
from tests.outer.nets import run

KEY = "0a" * 32
RELAYS = parse_relays(["relay.example:31500", "[2001:db8::1]:31501"])


def test_an_address_is_its_text_and_the_direct_route_comes_first():
    text = build_address(KEY, "203.0.113.7", 31400, RELAYS, 3, "payloads")
    relayed = "relay.example:31500/3/payloads;[2001:db8::1]:31501/3/payloads"
    assert text == f"tls:{KEY}@203.0.113.7:31400;{relayed}"
    address = parse_island_address(text)
    assert str(address) == text and find_key(text) == KEY
    assert address == IslandAddress(
        KEY,
        (
            Route("203.0.113.7", 31400),
            Route("relay.example", 31500, RelayTarget(3, "payloads")),
            Route("[2001:db8::1]", 31501, RelayTarget(3, "payloads")),
        ),
    )
    assert address.routes[2].place == ("2001:db8::1", 31501)


MALFORMED = [
    "",
    "host",
    "host:0",
    "host:65536",
    "host:1;",
    "host:1/0",
    "host:1/0/doors",
    "a b:1",
    ";".join(["h:1"] * 17),
]


@pytest.mark.parametrize("routes", MALFORMED)
def test_malformed_routes_are_refused(routes: str):
    with pytest.raises(MessageError, match="a malformed address"):
        parse_island_address(f"tls:{KEY}@{routes}")


@pytest.mark.parametrize(
    "text", ["", "relay", "relay:0", "0.0.0.0:1", "relay:1/0/calls", "tcp://relay:1"]
)
def test_what_is_no_relay_is_refused_with_what_is_allowed(text: str):
    with pytest.raises(InputError, match=r"island\.relays: got .*; allowed: HOST:PORT"):
        parse_relays([text])


def test_only_what_others_can_reach_is_announced_beside_relays():
    assert choose_announced_host("127.0.0.1", None) == "127.0.0.1"
    assert (
        choose_announced_host("127.0.0.1", None, RELAYS)
        is choose_announced_host("0.0.0.0", None, RELAYS)
        is None
    )
    assert choose_announced_host("0.0.0.0", "203.0.113.7", RELAYS) == "203.0.113.7"
    assert choose_announced_host("10.0.0.4", None, RELAYS) == "10.0.0.4"


@pytest.mark.parametrize("own", [{"relays": ["relay:1"]}, {"proxy": "http://proxy:1"}])
@pytest.mark.parametrize("kind", ["gloo", "hivemind"])
def test_relays_and_proxies_are_for_tls(kind: str, own: dict):
    with pytest.raises(InputError, match=r"island\.(relays|proxy): it is for outer\.transport tls"):
        run(open_network(kind, NetworkSettings("run", "a", 0, ["tcp://127.0.0.1:1"], **own)))
