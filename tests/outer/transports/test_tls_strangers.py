"""What strangers, other members and those between two islands find over TLS: no connection, no
payload, no memory.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.errors import InputError, PeerLost, TransportError
from outer.identity.tls import TlsIdentity
from outer.network.endpoints import Endpoint
from outer.network.run_key import RunKey
from outer.routes.addresses import Route
from outer.transports.tls.addresses import parse_address
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import A, B, C, connect, key_of, payload, run, swarm, tag

OLD = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
OLD.check_hostname, OLD.verify_mode, OLD.maximum_version = (
    False,
    ssl.CERT_NONE,
    ssl.TLSVersion.TLSv1_2,
)


def place_of(network: Network, me: Endpoint) -> Route:
    """Where an endpoint listens for payloads."""
    return parse_address(me, network.transport.address).routes[0]


def moved(network: Network, me: Endpoint, port: int) -> str:
    """An endpoint's address with another port."""
    address = parse_address(me, network.transport.address)
    return str(replace(address, routes=(replace(address.routes[0], port=port),)))


async def check_they_go_on(a: Network, b: Network, epoch: str = "1") -> None:
    await connect({A: a, B: b}, epoch)
    _, got = await asyncio.gather(
        a.transport.send(B, tag(0), payload(9)), b.transport.recv(A, tag(0), 9)
    )
    assert got.equal(payload(9))


def refused(network: Network) -> list[str]:
    return [kind for _, kind, _, count in network.rejections.drain() for _ in range(count)]


@pytest.mark.parametrize("port_of", ["calls", "payloads"])
def test_garbage_and_older_tls_are_refused_and_counted(port_of: str):
    async def main() -> None:
        async with swarm("tls") as place:
            a, b = await place.open(A), await place.open(B)
            port = (
                place_of(a, A).port
                if port_of == "payloads"
                else int(a.messenger.address.rpartition(":")[2])
            )
            for words in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"\x16\x03\x01" + b"\xff" * 4096,
                b"DLCO" + bytes(41),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(words)
                await asyncio.wait_for(reader.read(), 5)
                writer.close()
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await asyncio.open_connection("127.0.0.1", port, ssl=OLD)
            await wait_for(lambda: asyncio.sleep(0, a.rejections.total), 4, seconds=5)
            assert refused(a) == ["tls"] * 4
            await check_they_go_on(a, b)

    run(main())


def test_connections_that_say_nothing_end_and_keep_no_island_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outer.network.rejections.MAX_UNPROVEN_OF_HOST", 8)
    monkeypatch.setattr("outer.transports.tls.transport.HELLO_SECONDS", 1.0)
    monkeypatch.setattr("outer.transports.streams.HELLO_SECONDS", 1.0)

    async def main() -> None:
        async with swarm("tls") as place:
            a, b = await place.open(A), await place.open(B)
            port = place_of(a, A).port
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            half = await asyncio.open_connection("127.0.0.1", port, ssl=TlsIdentity().client)
            await check_they_go_on(a, b)
            for reader, writer in [*silent, half]:
                with suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()
            assert len(a.transport._guests._unproven) == 0
            assert set(refused(a)) == {"silent"}
            await check_they_go_on(a, b, "2")

    run(main())


@asynccontextmanager
async def between(port: int, tls: TlsIdentity | None) -> AsyncIterator[tuple[int, bytearray]]:
    """Somebody between two islands, who passes on what goes to a port: as it is, or out of one TLS
    and into another.
    """
    seen, tasks = bytearray(), set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection("127.0.0.1", port, ssl=tls and tls.client)
        for each in (pump(reader, onward[1]), pump(onward[0], writer)):
            tasks.add(asyncio.create_task(each))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls and tls.server)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()


async def echo(source: Endpoint, body: bytes) -> bytes:
    return body


def test_neither_payloads_nor_calls_can_be_read_on_their_way():
    async def main() -> None:
        async with swarm("tls") as place:
            a, b = await place.open(A), await place.open(B)
            b.messenger.serve("echo", echo)
            secret = bytes(payload(1 << 17).tolist())
            calls = int(b.messenger.address.rpartition(":")[2])
            async with (
                between(place_of(b, B).port, None) as (port, seen),
                between(calls, None) as (call, heard),
            ):
                addresses = {A: a.transport.address, B: moved(b, B, port)}
                await asyncio.gather(
                    a.transport.connect("1", addresses), b.transport.connect("1", addresses)
                )
                sending = a.transport.send(B, tag(0), payload(1 << 17))
                await asyncio.gather(sending, b.transport.recv(A, tag(0), 1 << 17))
                assert await a.messenger.call(
                    f"127.0.0.1:{call}", "echo", secret[:99], timeout_seconds=5
                )
            assert len(seen) > len(secret) and len(heard) > 99
            assert all(words not in seen + heard for words in (secret[:99], b"DLCO", b"echo"))

    run(main())


def test_whoever_ends_tls_between_two_islands_is_found_out():
    async def main() -> None:
        async with swarm("tls", connect_seconds=5) as place:
            a, b = await place.open(A), await place.open(B)
            calls = int(b.messenger.address.rpartition(":")[2])
            tls = TlsIdentity()
            async with (
                between(place_of(b, B).port, tls) as (port, seen),
                between(calls, tls) as (call, _),
            ):
                addresses = {A: a.transport.address, B: moved(b, B, port)}
                with pytest.raises(
                    PeerLost, match=r"b/0 does not hold the island key .* that it shows"
                ):
                    await asyncio.gather(
                        a.transport.connect("1", addresses), b.transport.connect("1", addresses)
                    )
                with pytest.raises(PeerLost, match="does not hold the island key"):
                    await a.messenger.call(f"127.0.0.1:{call}", "echo", b"", timeout_seconds=5)
            assert b"DLCO" in seen, "the one between has read the handshake, and no more"
            await a.transport.disconnect()
            await check_they_go_on(a, b, "2")

    run(main())


def test_another_member_at_an_islands_address_is_refused_and_so_is_one_that_takes_its_name():
    async def main() -> None:
        async with swarm("tls", connect_seconds=2) as place:
            a, b, c = await place.open(A), await place.open(B), await place.open(C)
            addresses = {A: a.transport.address, B: moved(b, B, place_of(c, C).port)}
            with pytest.raises(PeerLost, match="c/0 answers where b/0 was expected"):
                await a.transport.connect("1", addresses)
            c.transport._me = B
            with pytest.raises(PeerLost, match=r"is not b/0 of this group"):
                await a.transport.connect("2", addresses)
            with pytest.raises(TransportError):
                await asyncio.gather(
                    a.transport.connect("3", {A: a.transport.address, B: b.transport.address}),
                    c.transport.connect("3", {A: a.transport.address, B: c.transport.address}),
                )
            assert "name" in refused(a)
            await a.transport.disconnect()
            await check_they_go_on(a, b, "4")

    run(main())


KEY = RunKey(b"k" * 32)


async def joined(network: Network, other: Endpoint, addresses: dict[Endpoint, str]) -> None:
    """Join a group with another endpoint, and wait for something from it."""
    await network.transport.connect("1", addresses)
    await network.transport.recv(other, tag(0), 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run_id": "other"}, "another run"),
        ({"run_key": RunKey(b"o" * 32)}, "does not hold the run key"),
        ({"run_key": None}, "holds a run key, and this island has none"),
        ({"island_key": key_of("x")}, "the name 'b' belongs to the key"),
        ({"allow": [key_of("c").public]}, "a is not in island.allow"),
    ],
    ids=["run", "run-key", "no-run-key", "name", "allow"],
)
def test_who_is_of_another_run_or_key_is_told_why_and_lost(changes: dict, text: str):
    async def main() -> None:
        async with swarm("tls", connect_seconds=5, run_key=KEY) as place:
            a = await place.open(A, run_key=KEY)
            a.names.adopt({"b": key_of("b").public})
            own = {"island_key": key_of("b"), "run_key": KEY, "run_id": "run"} | changes
            # As rank 1 it asks no rendezvous, which would refuse it already.
            settings = NetworkSettings(
                island="b", rank=1, bootstrap=place.bootstrap, connect_seconds=5, **own
            )
            stranger = await open_network("tls", settings)
            place.networks.append(stranger)
            me = Endpoint("b", 1)
            addresses = {A: a.transport.address, me: stranger.transport.address}
            ends = joined(a, me, addresses), joined(stranger, A, addresses)
            lost = await asyncio.gather(*ends, return_exceptions=True)
            assert [type(error) for error in lost] == [PeerLost, PeerLost]
            assert text in " ".join(map(str, lost))
            assert a.rejections.total + stranger.rejections.total

    run(main())


def test_an_endpoint_that_nobody_listens_for_is_lost_by_name():
    async def main() -> None:
        async with swarm("tls") as place:
            a, b = await place.open(A), await place.open(B)
            await b.close()
            with pytest.raises(PeerLost, match="b/0 cannot be reached") as caught:
                await asyncio.wait_for(
                    a.transport.connect("1", {e: n.transport.address for e, n in ((A, a), (B, b))}),
                    5,
                )
            assert caught.value.peer == "b"

    run(main())


@pytest.mark.parametrize(
    "address",
    ["", "tls:@1.2.3.4:5", f"tls:{'0' * 64}@:5", f"tls:{'0' * 64}@host:0", "gloo:b/0@h:1"],
)
def test_a_malformed_address_is_a_lost_peer(address: str):
    with pytest.raises(PeerLost, match="malformed address of b/0"):
        parse_address(B, address)


def test_an_island_that_listens_everywhere_must_say_where_it_is_reached():
    with pytest.raises(
        InputError,
        match=r"island\.announce_host: got none, and island\.listen_host is '0\.0\.0\.0'",
    ):
        run(
            open_network(
                "tls", NetworkSettings("run", "a", 0, ["tcp://127.0.0.1:1"], listen_host="0.0.0.0")
            )
        )
