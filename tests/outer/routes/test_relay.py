"""Islands that nobody can reach take part through relays, which can neither read nor lie."""

import asyncio
import socket
import time

import pytest

from outer.connect.settings import Network
from outer.errors import PeerLost, TransportError, UnreachableError
from outer.identity.island_key import IslandKey
from outer.network.endpoints import Endpoint
from outer.routes import wire
from outer.routes.addresses import parse_island_address
from outer.routes.relay import Relay, RelayLimits
from outer.routes.wire import Answer, Dial, Incoming, Joined, Proof, Refused, Register, Registered
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import A, B, C, connect, key_of, payload, run, swarm, tag
from tests.outer.routes.relays import KEY, addresses, answered, connected, relays


async def echo(source: Endpoint, body: bytes) -> bytes:
    return body


async def exchange(a: Network, b: Network, num_bytes: int = 1 << 20) -> None:
    """Send a payload each way, and a call each way."""
    for one, two, me, you in ((a, b, A, B), (b, a, B, A)):
        _, got = await asyncio.gather(
            one.transport.send(you, tag(0), payload(num_bytes)),
            two.transport.recv(me, tag(0), num_bytes),
        )
        assert got.equal(payload(num_bytes))
        two.messenger.serve("echo", echo)
        assert (
            await one.messenger.call(two.messenger.address, "echo", b"words", timeout_seconds=5)
            == b"words"
        )


def test_an_island_that_only_dials_out_takes_part_through_a_relay():
    async def main() -> None:
        async with relays() as [relay], swarm("tls") as place:
            a, b = await place.open(A), await place.open(B, relays=addresses([relay]))
            for address, door in (
                (b.messenger.address, "calls"),
                (b.transport.address, "payloads"),
            ):
                [route] = parse_island_address(address).routes
                assert str(route) == f"127.0.0.1:{relay.port}/0/{door}"
            await connect({A: a, B: b}, "1")
            await exchange(a, b)

    run(main())


def test_two_islands_that_only_dial_out_reach_each_other():
    async def main() -> None:
        async with relays(2) as two, swarm("tls") as place:
            a, b = (
                await place.open(A, relays=addresses(two[:1])),
                await place.open(B, relays=addresses(two[1:])),
            )
            await connect({A: a, B: b}, "1")
            await exchange(a, b)

    run(main())


def test_a_direct_address_comes_before_the_relays_and_a_relay_is_used_if_it_fails():
    async def main() -> None:
        async with relays() as [relay], swarm("tls") as place:
            a, by = await place.open(A), addresses([relay])
            b = await place.open(B, announce_host="127.0.0.1", relays=by)
            c = await place.open(C, announce_host="127.0.0.9", relays=by)
            for network in (b, c):
                routes = parse_island_address(network.transport.address).routes
                assert [route.behind is None for route in routes] == [True, False]
            await connect({A: a, B: b, C: c}, "1")
            assert relay._islands[key_of("b").public].num_connections == 1, "its registration"
            assert relay._islands[key_of("c").public].num_connections == 3, (
                "and payloads of two islands"
            )
            await exchange(a, b)

    run(main())


def test_a_relay_that_lies_is_found_out():
    async def main() -> None:
        async with relays() as [relay], swarm("tls", connect_seconds=5) as place:
            a, b, c = [await place.open(each, relays=addresses([relay])) for each in (A, B, C)]
            relay._ranks[key_of("b").public, 0] = relay._ranks[key_of("c").public, 0]
            c.messenger.serve("echo", echo)
            with pytest.raises(PeerLost, match="c/0 answers where b/0 was expected"):
                await connect({A: a, B: b}, "1")
            with pytest.raises(
                PeerLost, match="c/0 answers where the island of another key was expected"
            ):
                await a.messenger.call(b.messenger.address, "echo", b"secret", timeout_seconds=5)

    run(main())


def test_the_next_try_goes_by_a_relay_that_does_not_lie():
    async def main() -> None:
        async with relays(2) as both, swarm("tls", connect_seconds=5) as place:
            a, b, _ = [await place.open(each, relays=addresses(both)) for each in (A, B, C)]
            await wait_for(
                lambda: asyncio.sleep(0, [len(relay._ranks) for relay in both]), [3, 3], seconds=5
            )
            both[0]._ranks[key_of("b").public, 0] = both[0]._ranks[key_of("c").public, 0]
            b.messenger.serve("echo", echo)
            with pytest.raises(PeerLost, match="of another key"):
                await a.messenger.call(b.messenger.address, "echo", b"words", timeout_seconds=5)
            assert (
                await a.messenger.call(b.messenger.address, "echo", b"words", timeout_seconds=5)
                == b"words"
            )
            with pytest.raises(PeerLost, match="c/0 answers where b/0"):
                await connect({A: a, B: b}, "1")
            await connect({A: a, B: b}, "2")
            await exchange(a, b)

    run(main())


def test_of_several_relays_a_dead_one_is_passed_over():
    async def main() -> None:
        async with relays(2) as two, swarm("tls", connect_seconds=5) as place:
            a, b = await place.open(A), await place.open(B, relays=addresses(two))
            await asyncio.sleep(0)
            await connect({A: a, B: b}, "1")
            await two[0].close()
            await connect({A: a, B: b}, "2")
            await exchange(a, b)
            assert two[1]._islands[key_of("b").public].num_connections == 3

    run(main())


def test_a_relay_that_returns_is_used_again():
    async def main() -> None:
        async with relays() as [relay], swarm("tls", connect_seconds=5) as place:
            a, b = await place.open(A), await place.open(B, relays=addresses([relay]))
            await relay.close()
            again = Relay()
            await again.open("127.0.0.1", relay.port)
            await wait_for(lambda: asyncio.sleep(0, len(again._ranks)), 1, seconds=5)
            await connect({A: a, B: b}, "1")
            await exchange(a, b)
            await again.close()

    run(main())


def test_an_island_that_has_gone_is_lost_at_once():
    async def main() -> None:
        async with relays() as [relay], swarm("tls", connect_seconds=20) as place:
            a, b = await place.open(A), await place.open(B, relays=addresses([relay]))
            await connect({A: a, B: b}, "1")
            await b.close()
            began = time.monotonic()
            with pytest.raises(PeerLost):
                await a.transport.recv(B, tag(0), 9)
            await wait_for(lambda: asyncio.sleep(0, len(relay._ranks)), 0, seconds=5)
            with pytest.raises(PeerLost, match="is not registered here"):
                await a.transport.connect("2", {A: a.transport.address, B: b.transport.address})
            assert time.monotonic() - began < 10

    run(main())


def test_an_island_that_no_relay_takes_says_why():
    async def main() -> None:
        async with (
            relays(allow=[key_of("a").public]) as [relay],
            swarm("tls", connect_seconds=1) as place,
        ):
            await place.open(A, relays=addresses([relay]))
            with pytest.raises(
                UnreachableError, match=rf"island\.relays: .*{key_of('b').public}: see its --allow"
            ):
                await place.open(B, relays=addresses([relay]))

    run(main())


async def registered(
    relay: Relay, key: IslandKey, signer: IslandKey | None = None, mac: str = ""
) -> tuple[socket.socket, str]:
    """A connection that asks to register, and the words with which the relay refuses it, or "" if
    it does not.
    """
    connection = await connected(relay)
    await wire.send(connection, register := Register(key=key.public, rank=0))
    body = wire.proof_body(await wire.receive(connection, wire.Challenge), register)
    signature = (signer or key).sign(wire.REGISTRATION, body).hex()
    await wire.send(connection, Proof(signature=signature, mac=mac))
    word = await wire.receive(connection, Registered, Refused)
    return connection, word.text if isinstance(word, Refused) else ""


def test_only_the_holder_of_a_key_registers_it_and_of_the_run_key_if_there_is_one():
    async def main() -> None:
        b, c = key_of("b"), key_of("c")
        async with relays() as [relay], relays(run_key=KEY) as [closed]:
            connection, words = await registered(relay, b, signer=c)
            assert "does not hold the island key" in words
            connection, words = await registered(closed, b)
            assert "run key" in words
            assert not relay._ranks and not closed._ranks
            mine, words = await registered(relay, b)
            assert words == ""
            connection.close()
            mine.close()
        async with relays(run_key=KEY) as [closed], swarm("tls", run_key=KEY) as place:
            await place.open(B, relays=addresses([closed]), run_key=KEY)
            assert list(closed._ranks) == [(key_of("b").public, 0)]

    run(main())


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "version": b"DLRY\x09\x00\x00\x00",
    "kind": b"DLRY\x01\x63\x00\x00",
    "long": b"DLRY\x01\x00\xff\xff",
    "json": b"DLRY\x01\x00\x00\x02{]",
    "pickle": b"DLRY\x01\x00\x00\x05\x80\x04K\x01.",
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_hostile_bytes_are_refused_and_counted(said: bytes):
    async def main() -> None:
        async with relays() as [relay]:
            assert await answered(relay, said)
            assert relay.rejections.total == 1

    run(main())


def test_what_a_stranger_may_ask_for_is_refused_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outer.routes.wire.OPENING_SECONDS", 0.3)
    dial = Dial(key=key_of("b").public, rank=0, door="calls")

    async def main() -> None:
        async with relays(limits=RelayLimits(connections_of_island=2)) as [relay]:
            assert "is not registered here" in await answered(relay, dial)
            assert "no dialer waits" in await answered(relay, Answer(token="0" * 32))
            assert "Joined where Register or Dial or Answer was expected" in await answered(
                relay, Joined()
            )
            assert await answered(relay) == ""  # silence
            assert [kind for _, kind, _, _ in relay.rejections.drain()] == [
                "absent",
                "token",
                "header",
                "silent",
            ]
            held, _ = await registered(relay, key_of("b"))
            waiting = asyncio.create_task(answered(relay, dial))
            token = (await wire.receive(held, Incoming)).token
            assert "forwards no more connections: 2 connections" in await answered(relay, dial)
            answer = await connected(relay)
            await wire.send(answer, Answer(token=token))
            await wire.receive(answer, Joined)
            assert "no dialer waits" in await answered(relay, Answer(token=token))
            answer.close()
            assert await waiting == ""
            held.close()
            await wait_for(lambda: asyncio.sleep(0, len(relay._islands)), 0, seconds=5)

    run(main())


def test_an_island_that_does_not_answer_keeps_no_dialer_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outer.routes.wire.ANSWER_SECONDS", 0.3)

    async def main() -> None:
        async with relays() as [relay]:
            held, _ = await registered(relay, key_of("b"))
            assert "did not answer in time" in await answered(
                relay, Dial(key=key_of("b").public, rank=0, door="calls")
            )
            assert not relay._pending
            held.close()

    run(main())


def test_a_relay_forgets_an_island_that_is_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outer.routes.wire.SILENT_SECONDS", 0.3)

    async def main() -> None:
        async with relays() as [relay]:
            held, _ = await registered(relay, key_of("b"))
            await wait_for(lambda: asyncio.sleep(0, len(relay._ranks)), 0, seconds=5)
            held.close()

    run(main())


def test_a_rank_that_registers_again_replaces_itself():
    async def main() -> None:
        async with relays() as [relay]:
            old, _ = await registered(relay, key_of("b"))
            new, _ = await registered(relay, key_of("b"))
            with pytest.raises(ConnectionResetError):
                await wire.receive(old, Incoming)
            waiting = asyncio.create_task(
                answered(relay, Dial(key=key_of("b").public, rank=0, door="calls"))
            )
            assert (await wire.receive(new, Incoming)).door == "calls"
            waiting.cancel()
            for each in (old, new):
                each.close()

    run(main())


def test_islands_behind_a_relay_that_ends_lose_each_other_by_name():
    async def main() -> None:
        async with relays() as [relay], swarm("tls", connect_seconds=2) as place:
            a, b = await place.open(A), await place.open(B, relays=addresses([relay]))
            await connect({A: a, B: b}, "1")
            await relay.close()
            with pytest.raises(TransportError, match="b"):
                await a.transport.recv(B, tag(0), 9)

    run(main())
