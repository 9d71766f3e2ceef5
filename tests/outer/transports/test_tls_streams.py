"""Streams over TLS: how many there are, when they are replaced, what they keep in memory, and how
they end.
"""

import asyncio

import pytest
import torch

from outer.errors import PeerLost
from outer.network.handshake import Stream
from outer.space.buffers import BUFFERS
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import A, B, C, connect, payload, run, swarm, tag
from tests.outer.transports.test_tls_strangers import check_they_go_on, joined, refused


def test_memory_is_kept_only_for_payloads_of_sizes_that_were_asked_for():
    async def main() -> None:
        async with swarm("tls") as place:
            a, b = await place.connect(A, B)
            await a.transport.send(B, tag(0), payload(123_457))
            await b.transport.send(A, tag(0), payload(123_459))
            await b.transport.recv(A, tag(0), 123_457)
            mailbox = a.transport._group.mailbox
            await wait_for(lambda: asyncio.sleep(0, len(mailbox._arrived)), 1, seconds=5)
            assert (await a.transport.recv(B, tag(0), 123_459)).numel() == 123_459
            await a.transport.send(B, tag(1), payload(123_457))
            await b.transport.recv(A, tag(1), 123_457)
            assert 123_459 not in BUFFERS._free and 123_457 in BUFFERS._free

    run(main())


def test_each_endpoint_chooses_the_number_of_streams_on_which_it_sends(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("outer.transports.tls.transport.MAX_TLS_STREAMS", 2)

    async def main() -> None:
        async with swarm("tls", connect_seconds=5) as place:
            a, b, c = (
                await place.open(A, tls_streams=4),
                await place.open(B),
                await place.open(C, tls_streams=5),
            )
            await connect({A: a, B: b}, "1")
            ways = [(a, A, b, B), (b, B, a, A)]
            sends = [
                one.transport.send(you, tag(i), payload(1 << 18, i))
                for one, _, _, you in ways
                for i in range(8)
            ]
            receives = [
                two.transport.recv(me, tag(i), 1 << 18) for _, me, two, _ in ways for i in range(8)
            ]
            *_, got = await asyncio.gather(*sends, asyncio.gather(*receives))
            assert all(one.equal(payload(1 << 18, i % 8)) for i, one in enumerate(got))
            assert [len(n.transport._group.outgoing[e]) for n, e in ((a, B), (b, A))] == [4, 1]
            with pytest.raises(PeerLost):
                await asyncio.gather(
                    joined(c, A, group := {e: n.transport.address for e, n in ((A, a), (C, c))}),
                    joined(a, C, group),
                )
            assert "streams" in refused(a)

    run(main())


def test_connections_that_have_carried_much_are_replaced_in_the_next_round_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("outer.transports.tls.transport.RENEW_BYTES", 1 << 18)

    async def main() -> None:
        async with swarm("tls") as place:
            ends = dict(zip((A, B, C), await place.connect(A, B, C), strict=True))
            pairs = [(s, t) for s in ends for t in ends if s != t]

            def streams() -> list[list[Stream]]:
                return [list(ends[s].transport._group.outgoing[t]) for s, t in pairs]

            async def until_replaced(old: list[list[Stream]], carried: list[int]) -> None:
                # A connection that came when a round's payloads had been sent has carried nothing,
                # and stays.
                worn = [index for index, num_bytes in enumerate(carried) if num_bytes >= 1 << 18]

                def count() -> int:
                    return sum(old[index] != streams()[index] for index in worn)

                await wait_for(lambda: asyncio.sleep(0, count()), len(worn), seconds=30)

            for round_number in range(4):
                before = streams()
                carried = [max(each.bytes_sent for each in of_pair) for of_pair in before]
                assert round_number != 1 or min(carried) >= 1 << 18, (
                    "the first round's connections are not replaced in it"
                )
                tags = [tag(part, round_number) for part in range(8)]
                sends = [
                    ends[s].transport.send(t, each, payload(1 << 17, each.part))
                    for s, t in pairs
                    for each in tags
                ]
                receives = [
                    ends[t].transport.recv(s, each, 1 << 17) for s, t in pairs for each in tags
                ]
                *_, got = await asyncio.gather(*sends, asyncio.gather(*receives))
                assert all(one.equal(payload(1 << 17, i % 8)) for i, one in enumerate(got))
                if round_number:
                    await until_replaced(before, carried)
            assert all(len(found) == 1 for found in streams())
            assert all(
                len(found) == 1
                for n in ends.values()
                for found in n.transport._group._incoming.values()
            )

    run(main())


def test_a_connection_that_cannot_be_replaced_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outer.transports.tls.transport.RENEW_BYTES", 1)

    async def main() -> None:
        async with swarm("tls", connect_seconds=1) as place:
            a, b, c = await place.connect(A, B, C)
            for other in (b, c):
                other.transport._listener._socket.close()
            old = list(a.transport._group.outgoing[B])
            for round_number in range(3):
                await a.transport.send(B, tag(0, round_number), payload(100))
                assert (await b.transport.recv(A, tag(0, round_number), 100)).equal(payload(100))
                await asyncio.sleep(0.2)
            assert a.transport._group.outgoing[B] == old

    run(main())


def test_a_connection_that_ends_within_a_payload_is_a_lost_peer_at_once():
    async def main() -> None:
        async with swarm("tls") as place:
            a, b = await place.connect(A, B)
            waiting = asyncio.create_task(b.transport.recv(A, tag(0), 1 << 26))
            sending = asyncio.create_task(
                a.transport.send(B, tag(0), torch.zeros(1 << 26, dtype=torch.uint8))
            )
            await asyncio.wait({sending}, timeout=0.01)
            assert not sending.done()
            await a.transport.disconnect()
            for task in (waiting, sending):
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(task, 5)
            await check_they_go_on(a, b, "2")

    run(main())


def test_a_cancelled_send_leaves_a_transport_that_can_reconnect():
    async def main() -> None:
        async with swarm("tls") as place:
            a, b = await place.connect(A, B)
            b.transport._group.mailbox._max_unclaimed_bytes = 0
            await a.transport.send(B, tag(0), payload(1))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await a.transport.send(B, tag(1), torch.zeros(1 << 26, dtype=torch.uint8))
            await check_they_go_on(a, b, "2")

    run(main())
