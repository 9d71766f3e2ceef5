"""An island's answers to a doctor, and the limits on them."""

import asyncio
import socket
import time

import pytest

from outer.connect.settings import Network
from outer.diagnostics import (
    DIAL_BACKS_PER_MINUTE,
    MAX_ADDRESS_LENGTH,
    MAX_PROBE_BYTES,
    Budget,
    BytesRequest,
    DiagnosticsServer,
    DialRequest,
    DialResult,
    ProbeReply,
    ProbeResponder,
    package_versions,
)
from outer.errors import MessageError, TransportError
from outer.network.callers import route_to
from outer.network.frames import VERSION
from outer.network.messages import parse
from tests.outer.nets import KINDS, A, B, C, Swarm, run, swarm

HASH = "0123456789abcdef"
TOO_MUCH = MAX_PROBE_BYTES + 1


async def open_probe_pair(place: Swarm) -> tuple[Network, Network]:
    """Open a caller and an island that answers it, in round 7, with a clock that says 2001."""
    caller, island = await place.open(A), await place.open(B)
    DiagnosticsServer(island.messenger, ProbeResponder(HASH, lambda: 7, lambda: 1e9))
    return caller, island


async def ask(caller: Network, island: Network, kind: str, body: bytes = b"") -> bytes:
    return await caller.messenger.call(
        island.messenger.address, kind, body, timeout_seconds=20, lane="bulk"
    )


async def dial_back(caller: Network, island: Network, address: str) -> DialResult:
    return parse(
        DialResult,
        await ask(
            caller, island, "dial_back", DialRequest(address=address).model_dump_json().encode()
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_island_says_who_it_is_and_moves_as_many_bytes_as_it_is_asked_to(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            caller, island = await open_probe_pair(place)
            told = parse(ProbeReply, await ask(caller, island, "probe"))
            assert (told.config_hash, told.round, told.unix_time, told.wire) == (
                HASH,
                7,
                1e9,
                VERSION,
            )
            assert told.versions == package_versions() and {"python", "diloco", "torch"} <= set(
                told.versions
            )
            for num_bytes in (1, 100_000):
                request = BytesRequest(num_bytes=num_bytes).model_dump_json().encode()
                assert len(await ask(caller, island, "probe_bytes", request)) == num_bytes
                assert await ask(caller, island, "probe_sink", bytes(num_bytes)) == b""

    run(main())


@pytest.mark.parametrize("kind", ["gloo", "hivemind"])
def test_an_island_calls_back_whom_it_can_reach_and_says_why_it_cannot(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            caller, island = await open_probe_pair(place)
            assert (
                "nothing here answers 'probe'"
                in (await dial_back(caller, island, caller.messenger.address)).cause
            )
            DiagnosticsServer(caller.messenger, ProbeResponder())
            assert (await dial_back(caller, island, caller.messenger.address)).cause == ""
            nowhere = (
                "127.0.0.1:9"
                if kind == "gloo"
                else caller.messenger.address.partition("@")[0] + "@/ip4/127.0.0.1/tcp/9"
            )
            closed = await dial_back(caller, island, nowhere)
            assert closed.cause or kind == "hivemind"  # libp2p keeps a connection that is there

    run(main())


@pytest.mark.parametrize("kind", ["gloo", "tls", "hivemind"])
def test_an_island_dials_no_host_but_its_callers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outer.diagnostics.DIAL_BACKS_PER_MINUTE", 20)

    async def main() -> None:
        async with swarm(kind) as place:
            caller, island = await open_probe_pair(place)
            key, peer = "0" * 64, "12D3KooX:0"
            for other in (
                "127.0.0.2:9",
                "name.invalid:9",
                "a:b",
                f"tls:{key}@169.254.169.254:80",
                f"tls:{key}@127.0.0.2:9/0/calls",
                "loopback:run/a/0",
                f"{peer}@/ip4/127.0.0.2/tcp/9",
                f"{peer}@/ip4/127.0.0.2/tcp/9/p2p/12D3KooX/p2p-circuit",
                f"{peer}@/dns/name.invalid/tcp/9",
            ):
                with pytest.raises(MessageError, match="called back"):
                    await dial_back(caller, island, other)

    run(main())


def test_what_listens_but_is_no_island_is_not_taken_for_one():
    async def main() -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with swarm("gloo") as place:
            caller, island = await open_probe_pair(place)
            server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            assert (await dial_back(caller, island, f"127.0.0.1:{port}")).cause
            server.close()

    run(main())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("probe", b"x"),
        ("probe_bytes", b""),
        ("probe_bytes", b'{"num_bytes": 0}'),
        ("probe_bytes", b'{"num_bytes": -5}'),
        ("probe_bytes", b'{"num_bytes": 1.5}'),
        ("probe_bytes", b'{"num_bytes": %d}' % TOO_MUCH),
        ("probe_bytes", b'{"num_bytes": 5, "more": 1}'),
        ("probe_sink", b""),
        ("probe_sink", bytes(TOO_MUCH)),
        ("dial_back", b"\xff"),
        ("dial_back", b'{"address": ""}'),
        ("dial_back", b'{"address": "10.0.0.1:80\\r\\nGET /"}'),
        ("dial_back", b'{"address": "%s"}' % (b"x" * (MAX_ADDRESS_LENGTH + 1))),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value[:30]),
)
def test_nonsense_is_refused_and_costs_the_asker_only(kind, body):
    async def main() -> None:
        async with swarm("loopback") as place:
            caller, island = await open_probe_pair(place)
            with pytest.raises(MessageError):
                await ask(caller, island, kind, body)
            assert await ask(caller, island, "probe")

    run(main())


def test_nobody_can_use_up_the_link():
    async def main() -> None:
        async with swarm("loopback") as place:
            caller, island = await open_probe_pair(place)
            largest = BytesRequest(num_bytes=MAX_PROBE_BYTES).model_dump_json().encode()
            for kind, body in (("probe_bytes", largest), ("probe_sink", bytes(MAX_PROBE_BYTES))):
                for _ in range(4):
                    await ask(caller, island, kind, body)
                with pytest.raises(MessageError, match="in a minute"):
                    for _ in range(4):  # refilled by half of one meanwhile, if the machine is slow
                        await ask(caller, island, kind, body)

    run(main())


def test_nobody_can_search_a_network_through_an_island():
    async def main() -> None:
        async with swarm("gloo") as place:
            caller, island = await open_probe_pair(place)
            with socket.create_server(("127.0.0.1", 0)) as listening:
                port = listening.getsockname()[1]
            with pytest.raises(MessageError, match="in a minute"):
                for _ in range(2 * DIAL_BACKS_PER_MINUTE):
                    await dial_back(caller, island, f"127.0.0.1:{port}")

    run(main())


def test_a_budget_fills_up_again_by_and_by():
    budget, deadline = Budget(60_000), time.monotonic() + 30
    budget.spend(60_000, "bytes")
    with pytest.raises(TransportError):
        budget.spend(60_000, "bytes")
    while time.monotonic() < deadline:
        try:
            budget.spend(10, "bytes")
            return
        except TransportError:
            continue
    raise AssertionError("it stays empty")


def test_a_greeting_from_a_peer_is_bounded():
    good = ProbeReply(
        versions=package_versions(), wire=1, unix_time=1e9, age_seconds=0, config_hash="", round=0
    ).model_dump()
    for change in (
        {"unix_time": float("nan")},
        {"unix_time": float("inf")},
        {"round": -1},
        {"config_hash": "no hash"},
        {"versions": {"x" * 65: ""}},
        {"versions": {str(i): "" for i in range(17)}},
    ):
        with pytest.raises(ValueError, match="ProbeReply"):
            ProbeReply(**(good | change))


def test_a_third_island_is_called_back_on_a_connection_of_its_own():
    async def main() -> None:
        async with swarm("gloo") as place:
            caller, island = await open_probe_pair(place)
            third = await place.open(C)
            greeted = asyncio.Event()

            async def on_probe(source, body):
                assert source == B
                greeted.set()
                return ProbeResponder().respond(body)

            third.messenger.serve("probe", on_probe)
            assert (await dial_back(caller, island, third.messenger.address)).cause == ""
            assert greeted.is_set()

    run(main())


@pytest.mark.parametrize(
    ("place", "route"),
    [
        ("10.0.0.1:7", "10.0.0.1:7"),
        ("10.0.0.1:7/4/calls", "10.0.0.1:7/4/calls"),
        ("[::1]:7", "[::1]:7"),
        ("[::ffff:10.0.0.1]:7", "10.0.0.1:7"),
        ("/ip4/10.0.0.1/tcp/7/p2p/12D3", "/ip4/10.0.0.1/tcp/7/p2p/12D3"),
        ("/ip6/::1/tcp/7", "/ip6/::1/tcp/7"),
        ("10.0.0.2:7", ""),
        ("10.0.0.1", ""),
        ("", ""),
        ("/ip4/10.0.0.2/tcp/7", ""),
        ("/", ""),
    ],
)
def test_a_route_leads_to_a_host_of_the_caller_or_is_none(place: str, route: str) -> None:
    assert asyncio.run(route_to({"10.0.0.1", "::1"}, place)) == route


@pytest.mark.parametrize(
    ("place", "route"),
    [("localhost:7", "127.0.0.1:7"), ("/dns/localhost/tcp/7", "/ip4/127.0.0.1/tcp/7")],
)
def test_a_name_of_a_host_is_resolved_once(place: str, route: str) -> None:
    assert asyncio.run(route_to({"127.0.0.1"}, place)) == route
