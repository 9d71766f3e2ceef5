import asyncio
import os
import select
import threading
from collections.abc import Callable

import pytest
import torch

from outer.errors import DeadlineError, InputError, MessageError, PeerLost, TransportError
from outer.keys import RunKey, Trust
from outer.membership.hivemind import open_messenger
from outer.network import Network, NetworkSettings, open_network
from outer.transports.base import Endpoint, Phase, Tag, Traffic, Transport
from outer.transports.gloo import PREAMBLE_BYTES, gloo_tag
from outer.transports.gloo_groups import KEPT_GROUPS
from outer.transports.hivemind_addresses import parse_address
from outer.transports.hivemind_daemon import DaemonSettings, start_daemon
from outer.transports.loopback import Hub
from outer.transports.mailbox import Mailbox
from outer.transports.sealed import SealedTransport
from outer.wire import HEADER_BYTES
from tests.outer.nets import KINDS, TEST_SECONDS, A, B, C, RemotePeer, connect, member, payload, run, swarm, tag

all_kinds = pytest.mark.parametrize("kind", KINDS)
real_kinds = pytest.mark.parametrize("kind", ["gloo", "hivemind"])


@all_kinds
def test_payloads_of_all_sizes_arrive_intact(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.connect(A, B)
            for part, num_bytes in enumerate([0, 1, 1 << 20, 8 << 20]):
                sending = a.transport.send(B, tag(part), payload(num_bytes))
                _, got = await asyncio.gather(sending, b.transport.recv(A, tag(part), num_bytes))
                assert torch.equal(got, payload(num_bytes))

    run(main())


@all_kinds
def test_payloads_are_found_by_tag_in_any_order(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.connect(A, B)
            sends = [a.transport.send(B, tag(i), payload(1000 + i, i)) for i in range(8)]
            receives = [b.transport.recv(A, tag(i), 1000 + i) for i in reversed(range(8))]
            *_, got = await asyncio.gather(*sends, asyncio.gather(*receives))
            assert all(torch.equal(p, payload(1000 + i, i)) for i, p in zip(reversed(range(8)), got, strict=True))

    run(main())


@all_kinds
def test_three_islands_of_unequal_ranks_exchange_all_to_all(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            endpoints = [A, B, Endpoint("b", 1), C]
            networks = dict(zip(endpoints, await place.connect(*endpoints), strict=True))
            pairs = [(s, t) for s in endpoints for t in endpoints if s.island != t.island]
            sends = [networks[s].transport.send(t, tag(t.rank), payload(5000, hash(s))) for s, t in pairs]
            receives = [networks[t].transport.recv(s, tag(t.rank), 5000) for s, t in pairs]
            *_, got = await asyncio.gather(*sends, asyncio.gather(*receives))
            for (source, _), value in zip(pairs, got, strict=True):
                assert torch.equal(value, payload(5000, hash(source)))

    run(main())


@all_kinds
def test_a_sent_buffer_may_be_reused_at_once(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.connect(A, B)
            buffer = payload(1 << 20)
            receiving = asyncio.create_task(b.transport.recv(A, tag(0), 1 << 20))
            await a.transport.send(B, tag(0), buffer)
            buffer.zero_()
            assert torch.equal(await receiving, payload(1 << 20))

    run(main())


@pytest.mark.parametrize("kind", ["loopback", "hivemind"])
def test_a_payload_of_another_size_is_refused(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.connect(A, B)
            await a.transport.send(B, tag(0), payload(10))
            with pytest.raises(MessageError, match=r"sent 10 bytes .* 11 expected"):
                await b.transport.recv(A, tag(0), 11)

    run(main())


def test_gloo_never_delivers_a_payload_of_another_size():
    async def main() -> None:
        async with swarm("gloo") as place:
            a, b = await place.connect(A, B)
            sending = asyncio.create_task(a.transport.send(B, tag(0), payload(1000)))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await b.transport.recv(A, tag(0), 10)
            await b.transport.disconnect()
            with pytest.raises(PeerLost):
                await sending

    run(main())


@all_kinds
def test_a_payload_of_an_earlier_group_is_never_delivered(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.connect(A, B)
            early = asyncio.create_task(a.transport.send(B, tag(0), payload(100, 1)))
            await asyncio.wait({early}, timeout=0.2)
            await connect({A: a, B: b}, "2")
            await asyncio.wait({early})
            assert early.exception() is None or isinstance(early.exception(), PeerLost)
            _, got = await asyncio.gather(
                a.transport.send(B, tag(0), payload(100, 2)), b.transport.recv(A, tag(0), 100)
            )
            assert torch.equal(got, payload(100, 2))

    run(main())


@all_kinds
def test_traffic_is_payload_and_headers_on_both_sides(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.connect(A, B)
            before = a.transport.traffic.bytes_sent, b.transport.traffic.bytes_received
            await asyncio.gather(
                *(a.transport.send(B, tag(i), payload(1000)) for i in range(3)),
                *(b.transport.recv(A, tag(i), 1000) for i in range(3)),
            )
            overhead = 2 * PREAMBLE_BYTES if kind == "gloo" else HEADER_BYTES
            assert a.transport.traffic.bytes_sent - before[0] == 3 * (1000 + overhead)
            assert b.transport.traffic.bytes_received - before[1] == 3 * (1000 + overhead)

    run(main())


@all_kinds
def test_leaving_a_group_is_heard_by_those_who_wait(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.connect(A, B)
            waiting = asyncio.create_task(b.transport.recv(A, tag(0), 10))
            await asyncio.wait({waiting}, timeout=0.1)
            await a.transport.disconnect()
            with pytest.raises(PeerLost) as caught:
                await asyncio.wait_for(waiting, 5)
            assert caught.value.peer == "a"

    run(main())


@all_kinds
def test_the_rest_reconnect_after_one_is_gone(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b, c = await place.connect(A, B, C)
            waiting = asyncio.create_task(a.transport.recv(C, tag(0), 10))
            await asyncio.wait({waiting}, timeout=0.1)
            await c.close()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(waiting, 5)
            await connect({A: a, B: b}, "2")
            _, got = await asyncio.gather(a.transport.send(B, tag(0), payload(9)), b.transport.recv(A, tag(0), 9))
            assert torch.equal(got, payload(9))

    run(main())


@all_kinds
def test_a_cancelled_recv_leaves_a_transport_that_can_reconnect(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.connect(A, B)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await a.transport.recv(B, tag(0), 10)
            await connect({A: a, B: b}, "2")
            _, got = await asyncio.gather(b.transport.send(A, tag(0), payload(9)), a.transport.recv(B, tag(0), 9))
            assert torch.equal(got, payload(9))

    run(main())


@all_kinds
def test_an_endpoint_that_does_not_come_is_named(kind):
    async def main() -> None:
        async with swarm(kind, connect_seconds=0.7) as place:
            a, b = await place.open(A), await place.open(B)
            with pytest.raises(DeadlineError, match="b/0 did not join"):
                await a.transport.connect("1", {A: a.transport.address, B: b.transport.address})

    run(main())


@all_kinds
def test_sending_outside_of_a_group_is_refused(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, _ = await place.connect(A, B)
            with pytest.raises(PeerLost, match="not in this group"):
                await a.transport.send(C, tag(0), payload(1))

    run(main())


@all_kinds
def test_closing_twice_is_harmless(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, _ = await place.connect(A, B)
            await a.close()
            await a.close()

    run(main())


@real_kinds
def test_a_killed_peer_is_lost_within_seconds(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a = await place.open(A)
            peer = RemotePeer(kind, place.bootstrap)
            try:
                told = await peer.hear()
                addresses = {A: a.transport.address, B: told["transport"]}
                peer.tell(addresses)
                await a.transport.connect("1", addresses)
                receiving = asyncio.create_task(a.transport.recv(B, tag(0), 10))
                calling = asyncio.create_task(a.messenger.call(told["control"], "hang", b"", timeout_seconds=30))
                assert (await peer.hear()) == {"called": True}
            finally:
                peer.kill()
            for waiting in (receiving, calling):
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(waiting, 8)
            if told["daemon"] is not None:
                assert await asyncio.to_thread(_has_ended, told["daemon"], 8)

    run(main())


def test_a_network_whose_daemon_has_died_closes_in_time():
    async def main() -> None:
        async with swarm("hivemind") as place:
            a, _ = await place.connect(A, B)
            assert a.membership is not None
            await a.membership.announce(member("a"))
            a.transport._daemon.p2p._child.kill()
            with pytest.raises(PeerLost):
                await asyncio.wait_for(a.transport.recv(B, tag(0), 1), 5)
            await asyncio.wait_for(a.close(), 8)

    run(main())


def test_a_lost_island_hears_of_it_and_so_do_the_others():
    async def main() -> None:
        async with swarm("loopback") as place:
            a, b, c = await place.connect(A, B, C)
            waits = [a.transport.recv(B, tag(0), 1), b.transport.recv(A, tag(0), 1), c.transport.recv(B, tag(0), 1)]
            tasks = [asyncio.create_task(w) for w in waits]
            await asyncio.wait(tasks, timeout=0.05)
            place.hub.lose("b")
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(r) for r in results] == [PeerLost] * 3
            with pytest.raises(PeerLost):
                await connect({A: a, B: b}, "2")

    run(main())


def test_loopback_delivers_late_and_out_of_order_across_event_loops():
    held: list = []
    hub = Hub(delivery=held.append)
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
        threading.Thread(target=lambda m=m, o=o: results.update({m: run(side(m, o))})) for m, o in ((A, B), (B, A))
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


def test_a_stream_that_claims_another_island_is_dropped():
    async def main() -> None:
        async with swarm("hivemind", connect_seconds=1) as place:
            a, b, c = await place.open(A), await place.open(B), await place.open(C)
            addresses = {A: a.transport.address, B: b.transport.address}
            # C dials A in B's name: a knows b's peer id, and libp2p proves the dialer's.
            c.transport._me = B
            with pytest.raises(TransportError):
                await asyncio.gather(
                    a.transport.connect("1", addresses),
                    c.transport.connect("1", {A: addresses[A], B: c.transport.address}),
                )
            with pytest.raises(DeadlineError, match="b/0 did not join"):
                await a.transport.connect("2", addresses)

    run(main())


class Tampered:
    """A transport whose sender gives every payload to `change` first."""

    def __init__(self, inner: Transport, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.traffic, self.address = inner.traffic, inner.address
        self.connect, self.recv, self.disconnect, self.close = inner.connect, inner.recv, inner.disconnect, inner.close
        self._inner, self._change = inner, change

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        await self._inner.send(to, tag, self._change(payload))


KEY = RunKey(b"k" * 32)


@pytest.mark.parametrize(
    ("key", "run_id", "sender", "change"),
    [
        (RunKey(b"o" * 32), "run", A, lambda p: p),
        (KEY, "another", A, lambda p: p),
        (KEY, "run", C, lambda p: p),
        (KEY, "run", A, lambda p: torch.cat([p[:-1], p[-1:] ^ 1])),
        (KEY, "run", A, lambda p: torch.cat([p[:1] ^ 1, p[1:]])),
        (KEY, "run", A, torch.zeros_like),
    ],
)
@pytest.mark.parametrize("num_bytes", [1, 2 << 20])
def test_a_sealed_payload_that_is_not_the_senders_is_refused_by_name(key, run_id, sender, change, num_bytes):
    async def main() -> None:
        async with swarm("loopback") as place:
            a, b = await place.connect(A, B)
            sending = SealedTransport(Tampered(a.transport, change), Trust(key), run_id, sender)
            receiving = SealedTransport(b.transport, Trust(KEY), "run", B)
            await sending.send(B, tag(0), payload(num_bytes))
            with pytest.raises(MessageError, match="payload of a/0 that was altered"):
                await receiving.recv(A, tag(0), num_bytes)

    run(main())


def test_a_sealed_payload_of_another_group_or_tag_is_refused():
    async def main() -> None:
        async with swarm("loopback") as place:
            a, b = await place.open(A), await place.open(B)
            sealed = {e: SealedTransport(n.transport, Trust(KEY), "run", e) for e, n in ((A, a), (B, b))}
            taken: list[torch.Tensor] = []
            sealed[A]._inner = Tampered(a.transport, lambda p: taken.append(p) or p)
            for epoch, again in (("1", tag(1)), ("2", tag(0))):
                await asyncio.gather(*(t.connect(epoch, {A: "", B: ""}) for t in sealed.values()))
                if not taken:
                    await sealed[A].send(B, tag(0), payload(9))
                    assert torch.equal(await sealed[B].recv(A, tag(0), 9), payload(9))
                await a.transport.send(B, again, taken[0])
                with pytest.raises(MessageError, match="altered"):
                    await sealed[B].recv(A, again, 9)

    run(main())


def test_peers_that_are_not_allowed_are_closed_before_they_are_heard():
    async def main() -> None:
        async with swarm("hivemind", connect_seconds=5) as place:
            a, b = await place.open(A), await place.open(B)
            settings = NetworkSettings("run", "c", 0, place.bootstrap, allow=[_peer_id(a)], connect_seconds=5)
            c = await open_network("hivemind", settings)
            place.opened.append(c)
            for network in (a, b, c):
                network.messenger.serve("echo", _echo)
            assert await a.messenger.call(c.messenger.address, "echo", b"ab", timeout_seconds=10) == b"ab"
            assert await c.messenger.call(a.messenger.address, "echo", b"ab", timeout_seconds=10) == b"ab"
            for caller, callee in ((b, c), (c, b)):
                with pytest.raises(PeerLost):
                    await caller.messenger.call(callee.messenger.address, "echo", b"", timeout_seconds=5)
            addresses = {B: b.transport.address, C: c.transport.address}
            with pytest.raises(TransportError):
                await b.transport.connect("1", addresses)
            assert {(peer, kind) for peer, kind, *_ in c.refusals.drain()} == {(_peer_id(b), "peer")}
            assert c.refusals.total >= 3

    run(main())


@pytest.mark.parametrize("peer_id", ["", "a", "/p2p/x", "12D3KooWBwgvuKTmfupyVkL18t78A1kTvu9HtfSfwbs1iUCnSVy"])
def test_a_malformed_peer_id_in_the_allow_list_is_the_users_mistake(peer_id):
    with pytest.raises(InputError, match=r"island\.allow: .* is no libp2p peer id"):
        run(open_network("hivemind", NetworkSettings("run", "a", 0, allow=[peer_id])))


@pytest.mark.parametrize("changes", [{"allow": ["x"]}, {"relay": "client"}])
def test_what_only_libp2p_can_do_is_refused_elsewhere(changes):
    with pytest.raises(InputError, match=r"island\.allow, island\.relay: .*use hivemind"):
        run(open_network("gloo", NetworkSettings("run", "a", 0, ["tcp://127.0.0.1:1"], **changes)))


def test_a_relay_client_without_relays_is_the_users_mistake():
    with pytest.raises(InputError, match=r"island\.relay: client needs relays .*island\.bootstrap"):
        run(open_network("hivemind", NetworkSettings("run", "a", 0, relay="client")))


@pytest.mark.slow
def test_an_island_that_cannot_be_dialled_answers_calls_through_a_relay():
    async def main() -> None:
        async with swarm("hivemind", connect_seconds=10) as place:
            # libp2p asks for a relay at once when it knows four, and after three minutes when it knows fewer.
            for rank in range(4):
                settings = NetworkSettings("run", f"relay-{rank}", 0, place.bootstrap[:1], relay="server")
                relay = await open_network("hivemind", settings)
                place.opened.append(relay)
                place.bootstrap.append(relay.transport.address.partition("@")[2])
            client = DaemonSettings(
                ["/ip4/127.0.0.1/tcp/0"], ["/ip4/127.0.0.1/tcp/1"], place.bootstrap, relay="client", connect_seconds=10
            )
            daemon = await start_daemon(client)
            try:
                messenger = await open_messenger(daemon, "run", B, Traffic(), Trust())
                messenger.serve("echo", _echo)
                assert "/p2p-circuit" in messenger.address
                a = await place.open(A)
                assert await _call_until_answered(a, messenger.address) == b"x" * 9999
                peers = await a.transport._daemon.p2p.list_peers()
                (known,) = [str(p.addrs) for p in peers if p.peer_id.to_base58() == daemon.peer_id]
                assert "p2p-circuit" in known
            finally:
                await daemon.close()

    run(main())


async def _call_until_answered(caller: Network, address: str) -> bytes:
    """The reply to a call, tried again while the relays do not know the callee yet."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await caller.messenger.call(address, "echo", b"x" * 9999, timeout_seconds=5)
            except PeerLost:
                await asyncio.wait({asyncio.create_task(asyncio.Event().wait())}, timeout=0.2)


async def _echo(source: Endpoint, body: bytes) -> bytes:
    return body


def _peer_id(network: Network) -> str:
    return network.transport.address.partition(":")[0]


def test_gloo_tags_tell_neighbouring_rounds_phases_and_parts_apart():
    tags = {gloo_tag(Tag(r, 0, phase, part), 100) for r in range(3) for phase in Phase for part in range(1000)}
    assert len(tags) == 3 * 2 * 1000
    assert max(tags) < 2**31


@pytest.mark.parametrize("dead", [A, C], ids=["the-first", "the-last"])
def test_a_dead_endpoint_of_a_gloo_group_is_named_without_a_wait(dead):
    async def main() -> None:
        async with swarm("gloo", connect_seconds=TEST_SECONDS) as place:
            networks = {endpoint: await place.open(endpoint) for endpoint in (A, B, C)}
            addresses = {endpoint: network.transport.address for endpoint, network in networks.items()}
            await networks[dead].close()
            with pytest.raises(PeerLost, match=f"{dead} cannot be reached") as caught:
                await asyncio.wait_for(networks[B].transport.connect("1", addresses), 8)
            assert caught.value.peer == dead.island

    run(main())


@pytest.mark.parametrize("dying", [A, C], ids=["the-first", "the-last"])
def test_an_endpoint_that_dies_before_its_gloo_group_is_built_is_named_without_a_wait(dying):
    async def main() -> None:
        async with swarm("gloo", connect_seconds=TEST_SECONDS) as place:
            networks = {endpoint: await place.open(endpoint) for endpoint in (A, B, C)}
            addresses = {endpoint: network.transport.address for endpoint, network in networks.items()}
            connecting = asyncio.create_task(networks[B].transport.connect("1", addresses))
            await asyncio.wait({connecting}, timeout=0.2)
            await networks[dying].close()
            with pytest.raises(PeerLost, match=f"{dying} went away"):
                await asyncio.wait_for(connecting, 8)
            await connect({e: n for e, n in networks.items() if e != dying}, "2")

    run(main())


def test_a_gloo_store_forgets_old_groups():
    async def main() -> None:
        async with swarm("gloo") as place:
            a, b = await place.connect(A, B)
            for epoch in range(2, 7):
                await connect({A: a, B: b}, str(epoch))
            keys = a.transport._store.keys()
            assert {key.split("/")[2] for key in keys} == {"5", "6"}
            assert len({key.split("/")[2] for key in keys}) == KEPT_GROUPS
            assert b.transport._store.keys() == []

    run(main())


def test_a_gloo_endpoint_is_reached_at_its_announced_host():
    async def main() -> None:
        async with swarm("gloo") as place:
            a = await open_network(
                "gloo", NetworkSettings("run", "a", 0, place.bootstrap, announce_host="localhost", connect_seconds=10)
            )
            b = await place.open(B)
            assert a.transport.address.startswith("gloo:a/0@localhost:")
            await connect({A: a, B: b}, "1")
            await a.close()

    run(main())


MALFORMED_ADDRESSES = ["", "gloo:", "gloo:a/0@h", "gloo:b/0@h:1", "gloo:a/1@h:1", "gloo:a/0@h:0", "gloo:a/0@h:65536"]


@pytest.mark.parametrize("text", [*MALFORMED_ADDRESSES, "gloo:a/0@:1", "gloo:a/0@h h:1", "x" * 9999, "gloo:a/0@h:1\n"])
def test_a_malformed_gloo_address_is_a_lost_peer(text):
    async def main() -> None:
        async with swarm("gloo") as place:
            b = await place.open(B)
            with pytest.raises(PeerLost, match="malformed address of a/0"):
                await b.transport.connect("1", {A: text, B: b.transport.address})

    run(main())


@pytest.mark.parametrize("text", ["", "x", "Qm:0@", "a" * 5000, "12D3KooW:0@/ip4/1.2.3.4", "\u0000:1@/tcp"])
def test_a_malformed_peer_address_is_a_lost_peer(text):
    with pytest.raises(PeerLost, match="malformed"):
        parse_address(text)


def test_an_unknown_transport_lists_the_choices():
    with pytest.raises(InputError, match="loopback, gloo, hivemind"):
        run(open_network("carrier-pigeon", NetworkSettings("run", "a", 0)))


def test_gloo_refuses_to_listen_on_every_address():
    with pytest.raises(InputError, match=r"0\.0\.0\.0.*not encrypted"):
        settings = NetworkSettings("run", "a", 0, ["tcp://127.0.0.1:1"], listen_host="0.0.0.0")
        run(open_network("gloo", settings))


@pytest.mark.parametrize(
    ("kind", "bootstrap"),
    [
        ("gloo", "tcp://127.0.0.1:1"),
        ("hivemind", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBwgvuKTmfupyVkL18t78A1kTvu9HtfSfwbs1iUCnSVyL"),
    ],
)
def test_an_unreachable_bootstrap_address_is_named_with_the_time_tried(kind, bootstrap):
    with pytest.raises(InputError, match=rf"{bootstrap}.* within .* s|within .* s: {bootstrap}"):
        run(open_network(kind, NetworkSettings("run", "a", 0, [bootstrap], connect_seconds=1)))


@pytest.mark.parametrize(
    ("kind", "bootstrap"),
    [("gloo", []), ("gloo", ["127.0.0.1:80"]), ("hivemind", ["nonsense"]), ("hivemind", ["/ip4/127.0.0.1/tcp/1"])],
)
def test_a_bootstrap_address_of_the_wrong_form_says_what_is_right(kind, bootstrap):
    with pytest.raises(InputError, match=r"island.bootstrap: .*(tcp://HOST:PORT|/ip4/)"):
        run(open_network(kind, NetworkSettings("run", "a", 0, bootstrap, connect_seconds=1)))


def _has_ended(pid: int, seconds: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)
