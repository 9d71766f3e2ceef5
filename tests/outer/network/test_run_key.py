import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from outer.connect.meeting import find_runs
from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.errors import InputError, MessageError, PeerLost
from outer.membership.rendezvous import serve_rendezvous
from outer.network.endpoints import Endpoint, Kind
from outer.network.frames import HEADER_BYTES
from outer.network.rejections import MAX_ENTRIES, OTHERS, Rejections
from outer.network.run_key import MAC_BYTES, RunKey, read_run_key, seal, unseal
from tests.outer.nets import A, B, Swarm, connect, key_of, member, payload, run, swarm, tag

KEY, OTHER = RunKey(b"k" * 32), RunKey(b"o" * 32)
real_kinds = pytest.mark.parametrize("kind", ["gloo", "hivemind"])
strangers = pytest.mark.parametrize(("ours", "theirs"), [(KEY, OTHER), (KEY, None), (None, KEY)])


async def open_network_with(place: Swarm, me: Endpoint, **changes) -> Network:
    """Open a network of the swarm with other settings. With gloo its rendezvous holds its key."""
    rendezvous = (
        serve_rendezvous("127.0.0.1", 0, changes.get("run_key")) if place.kind == "gloo" else None
    )
    bootstrap = [rendezvous.address] if rendezvous else place.bootstrap
    own = {"island_key": key_of(me.island), "connect_seconds": 20} | changes
    try:
        network = await open_network(
            place.kind, NetworkSettings("run", me.island, me.rank, bootstrap, **own)
        )
    finally:
        if rendezvous:  # these tests need the rendezvous only to open the network
            await asyncio.to_thread(rendezvous.close)
    place.networks.append(network)
    if place.kind == "hivemind" and not place.bootstrap:
        place.bootstrap.append(network.transport.address.partition("@")[2])
    return network


async def wait_for_rejection(network: Network, seconds: float = 5) -> None:
    """Wait until the network has counted a rejection, because the rejected side may notice it
    earlier.
    """
    async with asyncio.timeout(seconds):
        while not network.rejections.total:
            await asyncio.wait({asyncio.create_task(asyncio.Event().wait())}, timeout=0.01)


async def echo(source: Endpoint, body: bytes) -> bytes:
    return body


def test_a_key_is_the_same_on_every_island_and_for_no_two_purposes(tmp_path):
    for name, text in (("a", "k" * 32), ("b", f"\n  {'k' * 32}\n")):
        (tmp_path / name).write_text(text)
    a, b = (read_run_key(tmp_path / name) for name in "ab")
    assert a.derive("x", b"1") == b.derive("x", b"1")
    assert (
        len(
            {
                a.derive("x", b"1"),
                a.derive("x1", b""),
                a.derive("x", b"", b"1"),
                OTHER.derive("x", b"1"),
            }
        )
        == 4
    )


@pytest.mark.parametrize("content", [None, b"", b" \n", b"fifteen bytes.."])
def test_a_key_file_that_holds_no_key_is_the_users_mistake(tmp_path, content):
    path = tmp_path / "run.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"island\.run_key_file: .*run\.key.*/dev/urandom"):
        read_run_key(path)


def test_a_key_file_that_everybody_can_read_is_spoken_of(tmp_path, caplog):
    path = tmp_path / "run.key"
    path.write_bytes(b"k" * 32)
    for mode, expected in ((0o600, 0), (0o644, 1)):
        path.chmod(mode)
        with caplog.at_level(logging.WARNING):
            read_run_key(path)
        assert len([r for r in caplog.records if r.name == "outer.network.run_key"]) == expected


def test_the_secret_is_in_no_text_of_the_key():
    assert "kkkk" not in f"{KEY} {KEY!r} {vars(KEY)}"


def test_a_sealed_record_opens_with_its_key_and_purpose_alone():
    sealed = seal(KEY, "members/a", b"body")
    assert unseal(KEY, "members/a", sealed) == b"body"
    assert unseal(None, "members/a", seal(None, "members/a", b"body")) == b"body"
    sealed.decode()
    for key, purpose, raw in [
        (OTHER, "members/a", sealed),
        (None, "members/a", sealed),
        (KEY, "members/b", sealed),
        (KEY, "members/a", b"body"),
        (KEY, "members/a", sealed[:-1] + b"z"),
        (KEY, "members/a", sealed[:40]),
    ]:
        with pytest.raises(MessageError, match="seal"):
            unseal(key, purpose, raw)


@real_kinds
def test_islands_with_the_same_key_call_and_exchange_payloads(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = (
                await open_network_with(place, A, run_key=KEY),
                await open_network_with(place, B, run_key=KEY),
            )
            b.messenger.serve("echo", echo)
            assert (
                await a.messenger.call(b.messenger.address, "echo", b"x" * 999, timeout_seconds=10)
                == b"x" * 999
            )
            await connect({A: a, B: b}, "1")
            for part, num_bytes in enumerate([0, 1, 3 << 20]):
                sending = a.transport.send(B, tag(part), payload(num_bytes))
                _, got = await asyncio.gather(sending, b.transport.recv(A, tag(part), num_bytes))
                assert got.tolist()[:9] == payload(num_bytes).tolist()[:9]
                assert got.equal(payload(num_bytes))
            assert a.rejections.total == b.rejections.total == 0

    run(main())


@real_kinds
@strangers
def test_a_call_between_unequal_keys_is_refused_on_both_sides_by_name(kind, ours, theirs):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = (
                await open_network_with(place, A, run_key=ours),
                await open_network_with(place, B, run_key=theirs),
            )
            b.messenger.serve("echo", echo)
            with pytest.raises(PeerLost, match=r"run.key"):
                await a.messenger.call(b.messenger.address, "echo", b"", timeout_seconds=10)
            await wait_for_rejection(b)
            ((peer, reason, text, count),) = b.rejections.drain()
            where = a.messenger.address.partition(":")[0]
            assert (peer, reason, count) == (f"a/0 at {where}", "key", 1)
            assert "run key" in text

    run(main())


@strangers
def test_payloads_between_unequal_keys_are_refused_on_both_sides_by_name(ours, theirs):
    async def main() -> None:
        async with swarm("hivemind") as place:
            a, b = (
                await open_network_with(place, A, run_key=ours),
                await open_network_with(place, B, run_key=theirs),
            )
            addresses = {A: a.transport.address, B: b.transport.address}
            joining = [n.transport.connect("1", addresses) for n in (a, b)]
            errors = await asyncio.gather(*joining, return_exceptions=True)
            assert [type(e) for e in errors] == [PeerLost, PeerLost]
            assert all("run key" in str(e) for e in errors)
            await wait_for_rejection(b)
            assert {(peer[:8], kind) for peer, kind, *_ in b.rejections.drain()} == {
                ("a/0 at 1", "key")
            }

    run(main())


@strangers
def test_records_and_config_of_another_key_stay_hidden(ours, theirs):
    async def main() -> None:
        async with swarm("hivemind") as place:
            a, b = (
                await open_network_with(place, A, run_key=ours),
                await open_network_with(place, B, run_key=theirs),
            )
            assert a.membership is not None
            assert b.membership is not None
            await a.membership.announce(member("a"))
            await a.membership.publish_config("model: {}")
            assert list(await a.membership.members()) == ["a"]
            assert await b.membership.members() == {}
            for asking in (b.membership.read_config(), b.membership.publish_config("model: {}")):
                with pytest.raises(InputError, match=r"island\.run_key_file: .*run 'run'.* sealed"):
                    await asking
            (runs,) = [await find_runs(place.bootstrap[0], 10, ours)]
            assert (runs["run"].config_text, runs["run"].islands) == ("model: {}", ("a",))
            with pytest.raises(InputError, match=r"island\.run_key_file"):
                await find_runs(place.bootstrap[0], 10, theirs)

    run(main())


def test_a_frame_sent_twice_is_refused():
    async def main() -> None:
        async with call_through_proxy() as (b, proxy, called):
            frame = proxy.taken[-1]
            proxy.inject(frame)
            await wait_for_rejection(b)
            assert [(peer, kind) for peer, kind, *_ in b.rejections.drain()] == [
                ("a/0 at 127.0.0.1", "forged")
            ]
            assert called == [b"first"]

    run(main())


def test_a_recorded_connection_is_refused_when_it_is_played_again():
    async def main() -> None:
        async with call_through_proxy() as (b, proxy, called):
            _, writer = await asyncio.open_connection(*proxy.target)
            writer.write(b"".join(proxy.taken))
            await wait_for_rejection(b)
            assert [(peer, kind) for peer, kind, *_ in b.rejections.drain()] == [
                ("a/0 at 127.0.0.1", "key")
            ]
            assert called == [b"first"]
            writer.close()

    run(main())


@pytest.mark.parametrize("index", [-1, -17, 20, HEADER_BYTES + 2])
def test_an_altered_frame_is_refused(index):
    async def main() -> None:
        async with call_through_proxy() as (b, proxy, called):
            proxy.change = lambda frame: (
                frame[:index] + bytes([frame[index] ^ 1]) + frame[index:][1:]
            )
            with pytest.raises(PeerLost):
                await proxy.call(b"second")
            await wait_for_rejection(b)
            assert [(peer, kind) for peer, kind, *_ in b.rejections.drain()] == [
                ("a/0 at 127.0.0.1", "forged")
            ]
            assert called == [b"first"]

    run(main())


def test_a_frame_left_out_is_noticed_at_the_next():
    async def main() -> None:
        async with call_through_proxy() as (b, proxy, called):
            swallowed = asyncio.Event()
            proxy.change = lambda frame: swallowed.set() or b""
            second = asyncio.create_task(proxy.call(b"second"))
            await swallowed.wait()
            proxy.change = lambda frame: frame
            for call in (proxy.call(b"third"), second):
                with pytest.raises(PeerLost):
                    await call
            assert [(kind, count) for _, kind, _, count in b.rejections.drain()] == [("forged", 1)]
            assert called == [b"first"]

    run(main())


class Proxy:
    """A proxy between the caller a and b. Each write of a holds one or more frames and may be
    changed or repeated.
    """

    def __init__(self, caller: Network, target: tuple[str, int]) -> None:
        self.target, self._caller = target, caller
        self.taken: list[bytes] = []
        self.change: Callable[[bytes], bytes] = lambda frame: frame
        self._pumps: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def call(self, body: bytes, timeout_seconds: float = 5) -> bytes:
        address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return await self._caller.messenger.call(
            address, "echo", body, timeout_seconds=timeout_seconds
        )

    def inject(self, frame: bytes) -> None:
        self._to_target.write(frame)

    def close(self) -> None:
        self._server.close()
        for task in self._pumps:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, self._to_target = await asyncio.open_connection(*self.target)
        self._pumps = [
            asyncio.create_task(work) for work in (self._forth(reader), self._back(back, writer))
        ]
        await asyncio.wait(self._pumps)

    async def _forth(self, reader: asyncio.StreamReader) -> None:
        is_keyed = False
        while True:
            raw = await reader.readexactly(HEADER_BYTES)
            kind, length = raw[5], int.from_bytes(raw[-8:])
            frame = raw + await reader.readexactly(length + (MAC_BYTES if is_keyed else 0))
            is_keyed = is_keyed or kind == Kind.PROOF
            self.taken.append(frame)
            self._to_target.write(self.change(frame))

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()


@asynccontextmanager
async def call_through_proxy() -> AsyncIterator[tuple[Network, Proxy, list[bytes]]]:
    """Yields b, a proxy through which a has called it once, and the bodies of all calls that b has
    answered.
    """
    called: list[bytes] = []

    async def note(source: Endpoint, body: bytes) -> bytes:
        called.append(body)
        return body

    async with swarm("gloo") as place:
        a, b = (
            await open_network_with(place, A, run_key=KEY),
            await open_network_with(place, B, run_key=KEY),
        )
        b.messenger.serve("echo", note)
        host, _, port = b.messenger.address.partition(":")
        proxy = Proxy(a, (host, int(port)))
        await proxy.open()
        try:
            assert await proxy.call(b"first") == b"first"
            yield b, proxy, called
        finally:
            proxy.close()


def test_refusals_are_counted_by_kind_and_drained_once():
    rejections = Rejections()
    for peer, kind in [("a", "key"), ("a", "key"), ("b", "key"), ("b", "size")]:
        rejections.add(peer, kind, f"{peer} {kind}")
    assert rejections.total == 4
    assert rejections.drain() == [
        ("a", "key", "a key", 2),
        ("b", "key", "b key", 1),
        ("b", "size", "b size", 1),
    ]
    rejections.add("b", "size", "again")
    assert rejections.drain() == [("b", "size", "again", 1)]
    assert rejections.drain() == []


def test_a_peer_of_many_names_fills_neither_memory_nor_log(caplog):
    rejections = Rejections()
    with caplog.at_level(logging.WARNING):
        for name in range(10 * MAX_ENTRIES):
            rejections.add(f"{name}\n" + "x" * 10_000, "key", "y" * 10_000)
    new = rejections.drain()
    logged = [r.getMessage() for r in caplog.records if r.name == "outer.network.rejections"]
    assert rejections.total == 10 * MAX_ENTRIES
    assert len(new) == MAX_ENTRIES + 1
    assert (new[-1][0], new[-1][3]) == (OTHERS, 9 * MAX_ENTRIES)
    assert len(logged) < MAX_ENTRIES + 6
    assert max(len(text) for text in logged) < 1000
    assert not any("\n" in text for text in logged)


def test_refusals_may_be_drained_by_another_thread_meanwhile():
    rejections, taken = Rejections(), []
    adding = threading.Thread(target=lambda: [rejections.add("a", "key", "") for _ in range(2000)])
    adding.start()
    while adding.is_alive():
        taken += rejections.drain()
    assert sum(count for *_, count in taken + rejections.drain()) == 2000
