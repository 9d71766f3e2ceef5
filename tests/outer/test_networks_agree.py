"""The same islands over every network. A transport only moves bytes, so the numbers must be the
same.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from outer.config import NETWORKS, OuterConfig
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.loop import build_loop
from outer.membership.rendezvous import serve_rendezvous
from outer.network.event_loop import EventLoopThread
from outer.space.ranks import RankGroup
from outer.transports.loopback import Hub
from tests.outer.islands import GUARD_SECONDS, FakeParams, Island, identity_of, tensors
from tests.outer.nets import key_of, serve_dht

NAMES = ("a", "b", "c")


@contextmanager
def meeting_place(kind: str) -> Iterator[dict]:
    """The NetworkSettings that islands need to find each other."""
    if kind == "loopback":
        yield {"hub": Hub()}
    elif NETWORKS[kind].meets_at == "rendezvous":
        rendezvous = serve_rendezvous("127.0.0.1", 0)
        yield {"bootstrap": [rendezvous.address]}
        rendezvous.close()
    else:
        loop = EventLoopThread()
        peer = loop.run(serve_dht(), GUARD_SECONDS)
        yield {"bootstrap": list(peer.addresses)}
        loop.run(peer.close(), GUARD_SECONDS)
        loop.close()


def digests_of(name: str, kind: str, codec: str, where: dict, audit: float) -> list[str]:
    """Run one island for four rounds in its own thread, and return the digest after each round."""
    config = OuterConfig(
        rounds=4,
        transport=kind,
        codec=codec,
        start_islands=len(NAMES),
        wait_seconds=GUARD_SECONDS,
        audit=audit,
    )
    loop = EventLoopThread()
    settings = NetworkSettings(
        run_id="run",
        island=name,
        rank=0,
        island_key=key_of(name),
        connect_seconds=GUARD_SECONDS,
        **where,
    )
    network = loop.run(open_network(kind, settings), GUARD_SECONDS)
    try:
        params = FakeParams(tensors(scale=40))
        identity = identity_of(name)
        island = Island(
            name, params, build_loop(config, identity, params, RankGroup(), network, loop)
        )
        island.outer.begin()
        return [island.round(tokens=100 + ord(name)).digest for _ in range(4)]
    finally:
        loop.run(network.close(), GUARD_SECONDS)
        loop.close()


def trajectory(kind: str, codec: str, audit: float = 0.0) -> list[str]:
    """Digests that all islands agree on, by round."""
    # The first optimizer imports half of torch; from several threads at once that is not safe.
    torch.optim.SGD([torch.zeros(1)])
    with meeting_place(kind) as where, ThreadPoolExecutor(len(NAMES)) as pool:
        found = list(pool.map(lambda name: digests_of(name, kind, codec, where, audit), NAMES))
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("codec", [pytest.param("fp32", marks=pytest.mark.slow), "int8"])
def test_all_networks_give_the_same_digests_in_every_round(codec: str) -> None:
    loopback = trajectory("loopback", codec)
    assert len(set(loopback)) == 4
    assert trajectory("gloo", codec) == loopback
    assert trajectory("tls", codec) == loopback
    assert trajectory("hivemind", codec) == loopback


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo", "tls", "hivemind"])
def test_audits_over_real_networks_change_no_digest(kind: str) -> None:
    assert trajectory(kind, "int8", audit=1.0) == trajectory("loopback", "int8")


def test_the_event_loop_outlives_cancelled_work() -> None:
    loop = EventLoopThread()
    with pytest.raises(TimeoutError):
        loop.run(asyncio.sleep(GUARD_SECONDS), timeout_seconds=0.01)
    assert loop.run(asyncio.sleep(0, "alive"), timeout_seconds=GUARD_SECONDS) == "alive"
    loop.close()
