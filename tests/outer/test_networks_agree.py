"""The same islands over every network: the transport moves bytes, so the numbers must not know which one it was."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from outer.config import OuterConfig
from outer.loop import LoopThread
from outer.membership.hivemind import serve_bootstrap
from outer.membership.rendezvous import serve_rendezvous
from outer.network import NetworkSettings, open_network
from outer.sync import OuterLoop
from outer.team import Team
from outer.transports.loopback import Hub
from tests.outer.islands import GUARD_SECONDS, FakeParams, Island, identity_of, tensors

NAMES = ("a", "b", "c")


@contextmanager
def meeting_place(kind: str) -> Iterator[dict]:
    """What the islands' NetworkSettings need in order to meet."""
    if kind == "loopback":
        yield {"hub": Hub()}
    elif kind == "gloo":
        rendezvous = serve_rendezvous("127.0.0.1", 0)
        yield {"bootstrap": [rendezvous.address]}
        rendezvous.close()
    else:
        loop = LoopThread()
        peer = loop.run(serve_bootstrap(["/ip4/127.0.0.1/tcp/0"], None), GUARD_SECONDS)
        yield {"bootstrap": list(peer.addresses)}
        loop.run(peer.close(), GUARD_SECONDS)
        loop.close()


def digests_of(name: str, kind: str, codec: str, where: dict) -> list[str]:
    """The digests after each of four rounds of one island, in a thread of its own."""
    config = OuterConfig(rounds=4, transport=kind, codec=codec, start_islands=len(NAMES), wait_seconds=GUARD_SECONDS)
    loop = LoopThread()
    settings = NetworkSettings(run_id="run", island=name, rank=0, connect_seconds=GUARD_SECONDS, **where)
    network = loop.run(open_network(kind, settings), GUARD_SECONDS)
    try:
        params = FakeParams(tensors(scale=40))
        identity = identity_of(name)
        island = Island(name, params, OuterLoop(config, identity, params, Team(), network, loop))
        island.outer.begin()
        return [island.round(tokens=100 + ord(name)).digest for _ in range(4)]
    finally:
        loop.run(network.close(), GUARD_SECONDS)
        loop.close()


def trajectory(kind: str, codec: str) -> list[str]:
    """The digests that all islands agree on, round by round."""
    # The first optimizer imports half of torch; from several threads at once that is not safe.
    torch.optim.SGD([torch.zeros(1)])
    with meeting_place(kind) as where, ThreadPoolExecutor(len(NAMES)) as pool:
        found = list(pool.map(lambda name: digests_of(name, kind, codec, where), NAMES))
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("codec", [pytest.param("fp32", marks=pytest.mark.slow), "int8"])
def test_loopback_gloo_and_hivemind_give_the_same_digests_in_every_round(codec: str) -> None:
    loopback = trajectory("loopback", codec)
    assert len(set(loopback)) == 4
    assert trajectory("gloo", codec) == loopback
    assert trajectory("hivemind", codec) == loopback


def test_the_event_loop_outlives_cancelled_work() -> None:
    loop = LoopThread()
    with pytest.raises(TimeoutError):
        loop.run(asyncio.sleep(GUARD_SECONDS), timeout_seconds=0.01)
    assert loop.run(asyncio.sleep(0, "alive"), timeout_seconds=GUARD_SECONDS) == "alive"
    loop.close()
