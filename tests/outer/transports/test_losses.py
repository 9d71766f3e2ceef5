"""Every transport names the endpoints that leave, die or never come, and the others connect
again.
"""

import asyncio
import os
import select

import pytest
import torch

from outer.connect.settings import Network
from outer.errors import DeadlineError, PeerLost
from tests.outer.nets import (
    KINDS,
    TEST_SECONDS,
    A,
    B,
    C,
    RemotePeer,
    connect,
    member,
    payload,
    run,
    swarm,
    tag,
    with_connected,
)

all_kinds = pytest.mark.parametrize("kind", KINDS)
real_kinds = pytest.mark.parametrize("kind", ["gloo", "tls", "hivemind"])


@all_kinds
def test_leaving_a_group_is_heard_by_those_who_wait(kind):
    async def test(a: Network, b: Network) -> None:
        waiting = asyncio.create_task(b.transport.recv(A, tag(0), 10))
        await asyncio.wait({waiting}, timeout=0.1)
        await a.transport.disconnect()
        with pytest.raises(PeerLost) as caught:
            await asyncio.wait_for(waiting, 5)
        assert caught.value.peer == "a"

    with_connected(kind, test)


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
            _, got = await asyncio.gather(
                a.transport.send(B, tag(0), payload(9)), b.transport.recv(A, tag(0), 9)
            )
            assert torch.equal(got, payload(9))

    run(main())


@all_kinds
def test_a_cancelled_recv_leaves_a_transport_that_can_reconnect(kind):
    async def test(a: Network, b: Network) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await a.transport.recv(B, tag(0), 10)
        await connect({A: a, B: b}, "2")
        _, got = await asyncio.gather(
            b.transport.send(A, tag(0), payload(9)), a.transport.recv(B, tag(0), 9)
        )
        assert torch.equal(got, payload(9))

    with_connected(kind, test)


@all_kinds
def test_an_endpoint_that_does_not_come_is_named(kind):
    async def main() -> None:
        async with swarm(kind, connect_seconds=0.7) as place:
            a, b = await place.open(A), await place.open(B)
            with pytest.raises(DeadlineError, match="b/0 did not join"):
                await a.transport.connect("1", {A: a.transport.address, B: b.transport.address})

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
                calling = asyncio.create_task(
                    a.messenger.call(told["control"], "hang", b"", timeout_seconds=30)
                )
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
    async def test(a: Network, _: Network) -> None:
        assert a.membership is not None
        await a.membership.announce(member("a"))
        a.transport._daemon.p2p._child.kill()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(a.transport.recv(B, tag(0), 1), 5)
        await asyncio.wait_for(a.close(), 8)

    with_connected("hivemind", test)


def test_a_lost_island_hears_of_it_and_so_do_the_others():
    async def main() -> None:
        async with swarm("loopback") as place:
            a, b, c = await place.connect(A, B, C)
            waits = [
                a.transport.recv(B, tag(0), 1),
                b.transport.recv(A, tag(0), 1),
                c.transport.recv(B, tag(0), 1),
            ]
            tasks = [asyncio.create_task(w) for w in waits]
            await asyncio.wait(tasks, timeout=0.05)
            place.hub.lose("b")
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(r) for r in results] == [PeerLost] * 3
            with pytest.raises(PeerLost):
                await connect({A: a, B: b}, "2")

    run(main())


@pytest.mark.parametrize("dead", [A, C], ids=["the-first", "the-last"])
def test_a_dead_endpoint_of_a_gloo_group_is_named_without_a_wait(dead):
    async def main() -> None:
        async with swarm("gloo", connect_seconds=TEST_SECONDS) as place:
            networks = {endpoint: await place.open(endpoint) for endpoint in (A, B, C)}
            addresses = {
                endpoint: network.transport.address for endpoint, network in networks.items()
            }
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
            addresses = {
                endpoint: network.transport.address for endpoint, network in networks.items()
            }
            connecting = asyncio.create_task(networks[B].transport.connect("1", addresses))
            await asyncio.wait({connecting}, timeout=0.2)
            await networks[dying].close()
            with pytest.raises(PeerLost, match=f"{dying} disconnected"):
                await asyncio.wait_for(connecting, 8)
            await connect({e: n for e, n in networks.items() if e != dying}, "2")

    run(main())


def _has_ended(pid: int, seconds: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)
