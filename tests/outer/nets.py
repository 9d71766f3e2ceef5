"""Helpers for tests of the network: ranks of several islands on one event loop, or an island in its
own process.
"""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from outer.config import NETWORKS
from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.identity.island_key import IslandKey
from outer.membership.base import Member
from outer.membership.rendezvous import serve_rendezvous
from outer.network.endpoints import Endpoint, Leg, Tag
from outer.network.run_key import RunKey
from outer.transports.loopback import Hub

if TYPE_CHECKING:
    from outer.membership.dht.membership import BootstrapPeer

KINDS = ["loopback", "gloo", "tls", "hivemind"]
TLS_IN_DHT = "tls in a dht"
"""A swarm over tls whose islands meet in a DHT, not at a rendezvous."""
A, B, C = Endpoint("a", 0), Endpoint("b", 0), Endpoint("c", 0)
TEST_SECONDS = 120
ROOT = Path(__file__).parents[2]

torch.set_num_threads(1)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a test's coroutine. A hang fails the test."""
    return asyncio.run(asyncio.wait_for(work, TEST_SECONDS))


@asynccontextmanager
async def swarm(
    kind: str, run_id: str = "run", connect_seconds: float = 10, run_key: RunKey | None = None
) -> AsyncIterator["Swarm"]:
    """Create a Swarm, and close it and all of its networks at the end. `run_key` is the rendezvous'
    own.

    The test is skipped if it needs hivemind and that is not installed.
    """
    if kind in ("hivemind", TLS_IN_DHT):
        pytest.importorskip("hivemind")
    peer = await serve_dht() if kind == TLS_IN_DHT else None
    meets_at_rendezvous = peer is None and NETWORKS[kind].meets_at == "rendezvous"
    rendezvous = serve_rendezvous("127.0.0.1", 0, run_key) if meets_at_rendezvous else None
    bootstrap = [rendezvous.address] if rendezvous else list(peer.addresses) if peer else []
    place = Swarm("tls" if peer else kind, run_id, connect_seconds, bootstrap)
    try:
        yield place
    finally:
        for network in reversed(place.networks):
            await network.close()
        if rendezvous:
            rendezvous.close()
        if peer:
            await peer.close()


def with_two(kind: str, test: Callable[[Network, Network], Coroutine[Any, Any, None]]) -> None:
    """Run a test with the networks of the islands a and b, each of one rank. A hang fails the
    test.
    """

    async def main() -> None:
        async with swarm(kind) as place:
            await test(await place.open(A), await place.open(B))

    run(main())


def with_connected(
    kind: str, test: Callable[[Network, Network], Coroutine[Any, Any, None]]
) -> None:
    """Like `with_two`; the transports of both are connected in one group."""

    async def main() -> None:
        async with swarm(kind) as place:
            await test(*await place.connect(A, B))

    run(main())


class Swarm:
    """Opens networks that find each other."""

    def __init__(
        self, kind: str, run_id: str, connect_seconds: float, bootstrap: list[str]
    ) -> None:
        self.kind, self.run_id, self.connect_seconds, self.bootstrap = (
            kind,
            run_id,
            connect_seconds,
            bootstrap,
        )
        self.hub = Hub()
        self.networks: list[Network] = []
        self._daemon_addresses: dict[str, str | None] = {}

    async def open(self, me: Endpoint, run_id: str | None = None, **changes: Any) -> Network:
        """Open the network of one rank, with other settings if given. An island's rank 0 must be
        opened first.
        """
        own = {"island_key": key_of(me.island), "connect_seconds": self.connect_seconds}
        own |= {
            "daemon_address": self._daemon_addresses.get(me.island) if me.rank else None
        } | changes
        network = await open_network(
            self.kind,
            NetworkSettings(
                run_id=run_id or self.run_id,
                island=me.island,
                rank=me.rank,
                bootstrap=self.bootstrap,
                hub=self.hub,
                record_seconds=4,
                **own,
            ),
        )
        self.networks.append(network)
        self._daemon_addresses.setdefault(me.island, network.daemon_address)
        if self.kind == "hivemind" and not self.bootstrap:
            self.bootstrap.append(network.transport.address.partition("@")[2])
        return network

    async def connect(self, *endpoints: Endpoint, epoch: str = "1") -> list[Network]:
        """Open networks for these endpoints and connect them in one group."""
        networks = [await self.open(e) for e in endpoints]
        await connect(dict(zip(endpoints, networks, strict=True)), epoch)
        return networks


async def connect(networks: Mapping[Endpoint, Network], epoch: str) -> None:
    """Let all networks join one group."""
    addresses = {e: n.transport.address for e, n in networks.items()}
    await asyncio.gather(*(n.transport.connect(epoch, addresses) for n in networks.values()))


async def serve_dht() -> "BootstrapPeer":
    """A peer of a DHT on a free port. The test is skipped if hivemind is not installed."""
    pytest.importorskip("hivemind")
    from outer.membership.dht.membership import serve_bootstrap

    return await serve_bootstrap(["/ip4/127.0.0.1/tcp/0"], None)


def tag(part: int, round_number: int = 3) -> Tag:
    return Tag(round_number, 0, Leg.REDUCE, part)


def payload(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def key_of(island: str) -> IslandKey:
    """The key of a test's island, which follows from its name."""
    return IslandKey(hashlib.sha256(island.encode()).digest())


def member(island: str, incarnation: str = "00000000", **changes: Any) -> Member:
    fields = {
        "island": island,
        "incarnation": incarnation,
        "identity": key_of(island).public,
        "config_hash": "0123456789abcdef",
        "control_addresses": ["control"],
        "transport_addresses": ["transport"],
        "round": 0,
    }
    return Member(**(fields | changes))


class RemotePeer:
    """Island `b` in its own process. It joins a group with island `a`, serves calls, and then waits
    to be killed.
    """

    def __init__(self, kind: str, bootstrap: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.outer.peer", kind, *bootstrap],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    async def hear(self) -> dict[str, Any]:
        """Read the next message from the process."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line, f"the peer ended with {self._process.wait()}"
        return json.loads(line)

    def tell(self, addresses: Mapping[Endpoint, str]) -> None:
        """Send the process the addresses of the group, by endpoint."""
        assert self._process.stdin is not None
        pairs = [[e.island, e.rank, a] for e, a in addresses.items()]
        self._process.stdin.write(json.dumps(pairs).encode() + b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
