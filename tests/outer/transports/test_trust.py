"""Forged payloads and peers are rejected, and relays reach an island that cannot be dialled."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.errors import DeadlineError, InputError, MessageError, PeerLost, TransportError
from outer.identity.known_names import KnownNames
from outer.network.endpoints import Endpoint, Tag, Traffic
from outer.network.run_key import PeerAuth, RunKey
from outer.packages import has_hivemind
from outer.transports.base import Transport
from outer.transports.sealed import SealedTransport
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import A, B, C, key_of, payload, run, swarm, tag

if has_hivemind():
    from outer.membership.dht.membership import open_messenger
    from outer.transports.hivemind_daemon import DaemonSettings, start_daemon

over_streams = pytest.mark.parametrize("kind", ["tls", "hivemind"])


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
    """A transport that applies `change` to every payload before it is sent."""

    def __init__(self, inner: Transport, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.traffic, self.address, self.max_payload_bytes = (
            inner.traffic,
            inner.address,
            inner.max_payload_bytes,
        )
        self.connect, self.recv, self.disconnect, self.close = (
            inner.connect,
            inner.recv,
            inner.disconnect,
            inner.close,
        )
        self._inner, self._change, self.is_uneven = inner, change, inner.is_uneven

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        await self._inner.send(to, tag, self._change(payload))


KEY = RunKey(b"k" * 32)


def auth_of(island: str, key: RunKey = KEY) -> PeerAuth:
    """What an island of the run knows: its own key, and whom the names a, b and c belong to."""
    names = KnownNames()
    names.adopt({name: key_of(name).public for name in "abc"})
    return PeerAuth(key, island=key_of(island), names=names)


@pytest.mark.parametrize(
    ("key", "run_id", "sender", "island", "change"),
    [
        (RunKey(b"o" * 32), "run", A, "", lambda p: p),
        (KEY, "another", A, "", lambda p: p),
        (KEY, "run", C, "", lambda p: p),
        (KEY, "run", A, "c", lambda p: p),  # another member of the run
        (KEY, "run", A, "", lambda p: torch.cat([p[:-1], p[-1:] ^ 1])),
        (KEY, "run", A, "", lambda p: torch.cat([p[:1] ^ 1, p[1:]])),
        (KEY, "run", A, "", torch.zeros_like),
    ],
)
@pytest.mark.parametrize("num_bytes", [1, 2 << 20])
def test_a_sealed_payload_that_is_not_the_senders_is_refused_by_name(
    key, run_id, sender, island, change, num_bytes
):
    async def main() -> None:
        async with swarm("loopback") as place:
            a, b = await place.connect(A, B)
            sending = SealedTransport(
                Tampered(a.transport, change), auth_of(island or sender.island, key), run_id, sender
            )
            receiving = SealedTransport(b.transport, auth_of("b"), "run", B)
            await sending.send(B, tag(0), payload(num_bytes))
            with pytest.raises(MessageError, match="payload of a/0 that was altered"):
                await receiving.recv(A, tag(0), num_bytes)

    run(main())


def test_a_sealed_payload_of_another_group_or_tag_is_refused():
    async def main() -> None:
        async with swarm("loopback") as place:
            a, b = await place.open(A), await place.open(B)
            sealed = {
                e: SealedTransport(n.transport, auth_of(e.island), "run", e)
                for e, n in ((A, a), (B, b))
            }
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
            c = await place.open(C, allow=[_peer_id(a)])
            for network in (a, b, c):
                network.messenger.serve("echo", _echo)
            assert (
                await a.messenger.call(c.messenger.address, "echo", b"ab", timeout_seconds=10)
                == b"ab"
            )
            assert (
                await c.messenger.call(a.messenger.address, "echo", b"ab", timeout_seconds=10)
                == b"ab"
            )
            for caller, callee in ((b, c), (c, b)):
                with pytest.raises(PeerLost):
                    await caller.messenger.call(
                        callee.messenger.address, "echo", b"", timeout_seconds=5
                    )
            addresses = {B: b.transport.address, C: c.transport.address}
            with pytest.raises(TransportError):
                await b.transport.connect("1", addresses)
            assert {(peer, kind) for peer, kind, *_ in c.rejections.drain()} == {
                (_peer_id(b), "peer")
            }
            assert c.rejections.total >= 3

    run(main())


@pytest.mark.parametrize(
    "peer_id", ["", "a", "/p2p/x", "12D3KooWBwgvuKTmfupyVkL18t78A1kTvu9HtfSfwbs1iUCnSVy"]
)
def test_a_malformed_peer_id_in_the_allow_list_is_the_users_mistake(peer_id):
    with pytest.raises(InputError, match=r"island\.allow: .* nor a libp2p peer id"):
        run(open_network("hivemind", NetworkSettings("run", "a", 0, allow=[peer_id])))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"allow": ["x"]}, r"island\.allow: 'x' is not an island's key"),
        ({"relay": "client"}, r"island\.relay: .*use hive"),
    ],
)
def test_what_only_libp2p_can_do_is_refused_elsewhere(changes, text):
    with pytest.raises(InputError, match=text):
        run(open_network("gloo", NetworkSettings("run", "a", 0, ["tcp://127.0.0.1:1"], **changes)))


def test_a_relay_client_without_relays_is_the_users_mistake():
    with pytest.raises(InputError, match=r"island\.relay: client needs relays .*island\.bootstrap"):
        run(open_network("hivemind", NetworkSettings("run", "a", 0, relay="client")))


@pytest.mark.slow
def test_an_island_that_cannot_be_dialled_answers_calls_through_a_relay():
    async def main() -> None:
        async with swarm("hivemind", connect_seconds=10) as place:
            # libp2p asks for a relay at once when it knows four, and after three minutes when it
            # knows fewer.
            for rank in range(4):
                settings = NetworkSettings(
                    "run", f"relay-{rank}", 0, place.bootstrap[:1], relay="server"
                )
                relay = await open_network("hivemind", settings)
                place.networks.append(relay)
                place.bootstrap.append(relay.transport.address.partition("@")[2])
            client = DaemonSettings(
                ["/ip4/127.0.0.1/tcp/0"],
                ["/ip4/127.0.0.1/tcp/1"],
                place.bootstrap,
                relay="client",
                connect_seconds=10,
            )
            daemon = await start_daemon(client)
            try:
                messenger = await open_messenger(daemon, "run", B, Traffic())
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
    """Call again until the relays know the callee, and return its reply."""
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


@over_streams
def test_a_payload_that_is_longer_than_those_of_the_run_is_not_read(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.open(A), await place.open(B)
            a.transport.max_payload_bytes = 1000
            addresses = {A: a.transport.address, B: b.transport.address}
            await asyncio.gather(*(n.transport.connect("1", addresses) for n in (a, b)))
            await b.transport.send(A, tag(0), payload(1000))
            assert (await a.transport.recv(B, tag(0), 1000)).numel() == 1000
            with suppress(PeerLost):
                await b.transport.send(A, tag(1), payload(1001))
            with pytest.raises(MessageError, match="a frame of 1001 bytes, at most 1000"):
                await a.transport.recv(B, tag(1), 1001)

    run(main())


@over_streams
def test_streams_of_one_island_that_wait_for_a_group_leave_room_for_others(kind, monkeypatch):
    most = 1 if kind == "tls" else 4  # of the streams that c dials
    monkeypatch.setattr("outer.transports.streams.MAX_PARKED_OF_ISLAND", most)

    async def main() -> None:
        async with swarm(kind, connect_seconds=5) as place:
            a, b, c = await place.open(A), await place.open(B), await place.open(C)
            addresses = {A: a.transport.address, C: c.transport.address}
            waiting = asyncio.create_task(c.transport.connect("never", addresses))
            await wait_for(lambda: asyncio.sleep(0, a.transport._parked["c"]), most, seconds=20)
            addresses = {A: a.transport.address, B: b.transport.address}
            await asyncio.gather(*(n.transport.connect("1", addresses) for n in (a, b)))
            with pytest.raises(TransportError):
                await waiting
            assert not a.transport._parked["b"]

    run(main())
