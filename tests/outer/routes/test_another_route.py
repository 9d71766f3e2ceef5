"""A relay that dies while payloads travel: they come by another route, once, and nobody is lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outer.connect.settings import Network
from outer.errors import PeerLost
from outer.routes.relay import Relay
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import A, B, Swarm, connect, key_of, payload, run, swarm, tag
from tests.outer.routes.relays import addresses, relays

SIZE = 1 << 19


@asynccontextmanager
async def two_relays(
    of_a: bool = False,
) -> AsyncIterator[tuple[list[Relay], Network, Network, Swarm]]:
    """Islands a and b, of which b, and perhaps a, is reached by two relays only. Both are in a
    group.
    """
    async with relays(2) as both, swarm("tls", connect_seconds=5) as place:
        by = addresses(both)
        a, b = await place.open(A, relays=by if of_a else ()), await place.open(B, relays=by)
        for relay in both:
            await wait_for(
                lambda relay=relay: asyncio.sleep(0, len(relay._ranks)), 1 + of_a, seconds=5
            )
        await connect({A: a, B: b}, "1")
        yield both, a, b, place


@pytest.mark.parametrize("of_a", [False, True])
def test_payloads_under_way_come_by_the_other_relay(of_a: bool):
    async def main() -> None:
        async with two_relays(of_a) as (both, a, b, _):
            for round_number in range(3):
                tags = [tag(part, round_number) for part in range(12)]
                ways = [(a, b, A, B), (b, a, B, A)]
                sends = [
                    one.transport.send(you, t, payload(SIZE, t.part))
                    for one, _, _, you in ways
                    for t in tags
                ]
                receives = [two.transport.recv(me, t, SIZE) for _, two, me, _ in ways for t in tags]
                work = asyncio.gather(*sends, *receives)
                if round_number == 1:
                    meter = both[0]._islands[key_of("b").public].meter
                    enough = meter.num_bytes + 2 * SIZE
                    await wait_for(
                        lambda meter=meter, enough=enough: asyncio.sleep(
                            0, meter.num_bytes > enough
                        ),
                        True,
                        seconds=5,
                    )
                    await both[0].close()
                got = (await work)[len(sends) :]
                assert all(each.equal(payload(SIZE, i % 12)) for i, each in enumerate(got))
                assert (
                    not a.transport._group.mailbox._arrived
                    and not b.transport._group.mailbox._arrived
                )
            assert a.rejections.total + b.rejections.total == 0

    run(main())


def test_an_idle_stream_is_replaced_before_it_is_needed():
    async def main() -> None:
        async with two_relays() as (both, a, b, _):
            await both[0].close()
            await wait_for(
                lambda: asyncio.sleep(0, both[1]._islands[key_of("b").public].num_connections),
                2,
                seconds=5,
            )
            _, got = await asyncio.gather(
                a.transport.send(B, tag(0), payload(9)), b.transport.recv(A, tag(0), 9)
            )
            assert got.equal(payload(9))

    run(main())


def test_who_leaves_a_group_is_lost_to_it_at_once_and_not_dialled_again():
    async def main() -> None:
        async with two_relays(of_a=True) as (_, a, b, _):
            waiting = asyncio.create_task(a.transport.recv(B, tag(0), 9))
            await asyncio.sleep(0)
            began = time.monotonic()
            await b.transport.disconnect()
            with pytest.raises(PeerLost):
                await waiting
            with pytest.raises(PeerLost):
                await a.transport.send(B, tag(0), payload(9))
            assert time.monotonic() - began < 4
            await a.transport.disconnect()
            await connect({A: a, B: b}, "2")
            _, got = await asyncio.gather(
                a.transport.send(B, tag(0), payload(9)), b.transport.recv(A, tag(0), 9)
            )
            assert got.equal(payload(9)) and a.rejections.total + b.rejections.total == 0

    run(main())


def test_when_no_route_is_left_the_island_is_lost():
    async def main() -> None:
        async with two_relays() as (both, a, b, _):
            sending = asyncio.create_task(a.transport.send(B, tag(0), payload(64 << 20)))
            for relay in both:
                await relay.close()
            with pytest.raises(PeerLost, match="b"):
                await sending
            with pytest.raises(PeerLost, match="a"):
                await b.transport.recv(A, tag(0), 64 << 20)

    run(main())
