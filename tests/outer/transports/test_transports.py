"""Guarantees of every transport for its payloads, and its building blocks: mailboxes, tags and
stores.
"""

import asyncio
import threading

import pytest
import torch

from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.errors import MessageError, PeerLost
from outer.network.endpoints import Endpoint, Leg, Tag
from outer.network.frames import HEADER_BYTES
from outer.transports.gloo.transport import PREAMBLE_BYTES, gloo_tag
from outer.transports.loopback import Hub
from outer.transports.mailbox import ENTRY_BYTES, Mailbox
from tests.outer.nets import (
    KINDS,
    A,
    B,
    C,
    connect,
    key_of,
    payload,
    run,
    swarm,
    tag,
    with_connected,
)

all_kinds = pytest.mark.parametrize("kind", KINDS)


@all_kinds
def test_payloads_of_all_sizes_arrive_intact(kind):
    async def test(a: Network, b: Network) -> None:
        for part, num_bytes in enumerate([0, 1, 1 << 20, 8 << 20]):
            sending = a.transport.send(B, tag(part), payload(num_bytes))
            _, got = await asyncio.gather(sending, b.transport.recv(A, tag(part), num_bytes))
            assert torch.equal(got, payload(num_bytes))

    with_connected(kind, test)


@all_kinds
def test_payloads_are_found_by_tag_in_any_order(kind):
    async def test(a: Network, b: Network) -> None:
        sends = [a.transport.send(B, tag(i), payload(1000 + i, i)) for i in range(8)]
        receives = [b.transport.recv(A, tag(i), 1000 + i) for i in reversed(range(8))]
        *_, got = await asyncio.gather(*sends, asyncio.gather(*receives))
        assert all(
            torch.equal(p, payload(1000 + i, i))
            for i, p in zip(reversed(range(8)), got, strict=True)
        )

    with_connected(kind, test)


@all_kinds
def test_three_islands_of_unequal_ranks_exchange_all_to_all(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            endpoints = [A, B, Endpoint("b", 1), C]
            networks = dict(zip(endpoints, await place.connect(*endpoints), strict=True))
            pairs = [(s, t) for s in endpoints for t in endpoints if s.island != t.island]
            sends = [
                networks[s].transport.send(t, tag(t.rank), payload(5000, hash(s))) for s, t in pairs
            ]
            receives = [networks[t].transport.recv(s, tag(t.rank), 5000) for s, t in pairs]
            *_, got = await asyncio.gather(*sends, asyncio.gather(*receives))
            for (source, _), value in zip(pairs, got, strict=True):
                assert torch.equal(value, payload(5000, hash(source)))

    run(main())


def test_ranks_on_two_nodes_have_a_daemon_each_which_carries_their_own_payloads():
    async def main() -> None:
        async with swarm("hivemind") as place:
            a, b = await place.open(A), await place.open(B)
            other_node, same_node = Endpoint("b", 1), Endpoint("b", 2)
            far = await place.open(other_node, daemon_address=None)
            near = await place.open(same_node, daemon_address=far.daemon_address)
            networks = {A: a, B: b, other_node: far, same_node: near}
            peers = {
                end: network.transport.address.partition(":")[0]
                for end, network in networks.items()
            }
            assert peers[other_node] == peers[same_node] and len(set(peers.values())) == 3
            await connect(networks, "1")
            for end in (other_node, same_node):
                sending = networks[end].transport.send(A, tag(end.rank), payload(5000))
                _, got = await asyncio.gather(sending, a.transport.recv(end, tag(end.rank), 5000))
                assert torch.equal(got, payload(5000))
            assert [networks[end].wait_for_loss is not None for end in networks] == [
                True,
                True,
                True,
                False,
            ]

    run(main())


@all_kinds
def test_a_rank_that_shares_no_part_is_connected_alone(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            (alone,) = await place.connect(A)
            with pytest.raises(PeerLost, match="not in this group"):
                await alone.transport.send(B, tag(0), payload(10))

    run(main())


@all_kinds
def test_a_sent_buffer_may_be_reused_at_once(kind):
    async def test(a: Network, b: Network) -> None:
        buffer = payload(1 << 20)
        receiving = asyncio.create_task(b.transport.recv(A, tag(0), 1 << 20))
        await a.transport.send(B, tag(0), buffer)
        buffer.zero_()
        assert torch.equal(await receiving, payload(1 << 20))

    with_connected(kind, test)


@pytest.mark.parametrize("kind", ["loopback", "tls", "hivemind"])
def test_a_payload_of_another_size_is_refused(kind):
    async def test(a: Network, b: Network) -> None:
        await a.transport.send(B, tag(0), payload(10))
        with pytest.raises(MessageError, match=r"sent 10 bytes .* 11 expected"):
            await b.transport.recv(A, tag(0), 11)

    with_connected(kind, test)


def test_gloo_never_delivers_a_payload_of_another_size():
    async def test(a: Network, b: Network) -> None:
        sending = asyncio.create_task(a.transport.send(B, tag(0), payload(1000)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await b.transport.recv(A, tag(0), 10)
        await b.transport.disconnect()
        with pytest.raises(PeerLost):
            await sending

    with_connected("gloo", test)


@all_kinds
def test_a_payload_of_an_earlier_group_is_never_delivered(kind):
    async def test(a: Network, b: Network) -> None:
        early = asyncio.create_task(a.transport.send(B, tag(0), payload(100, 1)))
        await asyncio.wait({early}, timeout=0.2)
        await connect({A: a, B: b}, "2")
        await asyncio.wait({early})
        assert early.exception() is None or isinstance(early.exception(), PeerLost)
        _, got = await asyncio.gather(
            a.transport.send(B, tag(0), payload(100, 2)), b.transport.recv(A, tag(0), 100)
        )
        assert torch.equal(got, payload(100, 2))

    with_connected(kind, test)


@all_kinds
def test_traffic_is_payload_and_headers_on_both_sides(kind):
    async def test(a: Network, b: Network) -> None:
        before = a.transport.traffic.bytes_sent, b.transport.traffic.bytes_received
        await asyncio.gather(
            *(a.transport.send(B, tag(i), payload(1000)) for i in range(3)),
            *(b.transport.recv(A, tag(i), 1000) for i in range(3)),
        )
        overhead = 2 * PREAMBLE_BYTES if kind == "gloo" else HEADER_BYTES
        assert a.transport.traffic.bytes_sent - before[0] == 3 * (1000 + overhead)
        assert b.transport.traffic.bytes_received - before[1] == 3 * (1000 + overhead)

    with_connected(kind, test)


@all_kinds
def test_sending_outside_of_a_group_is_refused(kind):
    async def test(a: Network, _: Network) -> None:
        with pytest.raises(PeerLost, match="not in this group"):
            await a.transport.send(C, tag(0), payload(1))

    with_connected(kind, test)


@all_kinds
def test_closing_twice_is_harmless(kind):
    async def test(a: Network, _: Network) -> None:
        await a.close()
        await a.close()

    with_connected(kind, test)


def test_loopback_delivers_late_and_out_of_order_across_event_loops():
    held: list = []
    hub = Hub(delivery=lambda parcel, deliver: held.append(deliver))
    opened, sent = threading.Barrier(2), threading.Event()

    async def side(me: Endpoint, other: Endpoint) -> list[torch.Tensor]:
        network = await open_network("loopback", NetworkSettings("run", me.island, 0, hub=hub))
        await asyncio.to_thread(opened.wait, 10)
        await network.transport.connect("1", {me: "", other: ""})
        for part in range(4):
            await network.transport.send(other, tag(part), payload(100, part))
        await asyncio.to_thread(opened.wait, 10)
        if me == A:
            for deliver in reversed(held):
                deliver()
            sent.set()
        await asyncio.to_thread(sent.wait, 10)
        got = [await network.transport.recv(other, tag(part), 100) for part in range(4)]
        await asyncio.to_thread(opened.wait, 10)
        return got

    results: dict[Endpoint, list[torch.Tensor]] = {}
    threads = [
        threading.Thread(target=lambda m=m, o=o: results.update({m: run(side(m, o))}))
        for m, o in ((A, B), (B, A))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for me in (A, B):
        assert all(torch.equal(results[me][part], payload(100, part)) for part in range(4))


def test_a_full_mailbox_stops_its_source_until_something_is_claimed():
    async def main() -> None:
        mailbox = Mailbox([A, B], max_unclaimed_bytes=100)
        mailbox.put(A, tag(0), payload(101))
        blocked = asyncio.create_task(mailbox.wait_for_space(A))
        await asyncio.wait_for(mailbox.wait_for_space(B), 1)
        done, _ = await asyncio.wait({blocked}, timeout=0.05)
        assert not done
        await mailbox.get(A, tag(0), 101)
        await asyncio.wait_for(blocked, 1)

    run(main())


def test_payloads_without_bytes_fill_a_mailbox_too():
    async def main() -> None:
        mailbox = Mailbox([A], max_unclaimed_bytes=99 * ENTRY_BYTES)
        for part in range(100):
            await asyncio.wait_for(mailbox.wait_for_space(A), 1)
            mailbox.put(A, tag(part), payload(0))
        blocked = asyncio.create_task(mailbox.wait_for_space(A))
        done, _ = await asyncio.wait({blocked}, timeout=0.05)
        assert not done
        await mailbox.get(A, tag(0), 0)
        await asyncio.wait_for(blocked, 1)

    run(main())


def test_a_mailbox_refuses_strangers_and_repetitions():
    async def main() -> None:
        mailbox = Mailbox([A])
        mailbox.put(A, tag(0), payload(1))
        with pytest.raises(MessageError, match="second payload"):
            mailbox.put(A, tag(0), payload(1))
        with pytest.raises(MessageError, match="not in this group"):
            mailbox.put(B, tag(0), payload(1))

    run(main())


def test_what_arrived_before_a_loss_is_still_delivered():
    async def main() -> None:
        mailbox = Mailbox([A])
        mailbox.put(A, tag(0), payload(1))
        mailbox.fail(A, PeerLost("a", "gone"))
        assert (await mailbox.get(A, tag(0), 1)).numel() == 1
        with pytest.raises(PeerLost, match="gone"):
            await mailbox.get(A, tag(1), 1)

    run(main())


def test_gloo_tags_tell_neighbouring_rounds_phases_and_parts_apart():
    tags = {
        gloo_tag(Tag(r, 0, phase, part), 100)
        for r in range(3)
        for phase in Leg
        for part in range(1000)
    }
    assert len(tags) == 3 * 2 * 1000
    assert max(tags) < 2**31


def test_loopback_islands_know_each_others_keys_whoever_comes_first():
    async def main() -> None:
        hub, keys = Hub(), {name: key_of(name) for name in "ab"}
        settings = [
            NetworkSettings("run", name, 0, hub=hub, island_key=key) for name, key in keys.items()
        ]
        a, b = [await open_network("loopback", each) for each in settings]
        assert (a.names.key_of("b"), b.names.key_of("a")) == (keys["b"].public, keys["a"].public)
        assert a.island_key.public == keys["a"].public

    run(main())
