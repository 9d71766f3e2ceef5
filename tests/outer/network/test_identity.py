"""What an attacker who holds the run key cannot do: it speaks the real wire with an island key of
its own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outer.connect.settings import Network
from outer.errors import InputError, MessageError, PeerLost, TransportError
from outer.identity import access
from outer.membership.records import (
    SLACK_MS,
    Announcement,
    open_records,
    sign_record,
    sign_withdrawal,
)
from outer.network.endpoints import Endpoint, Kind
from outer.network.frames import Header, hash_names, pack_header
from outer.network.run_key import PeerAuth, RunKey
from outer.packages import has_hivemind
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import A, B, C, Swarm, key_of, member, run, swarm

if has_hivemind():
    from hivemind.utils.timed_storage import get_dht_time

    from outer.membership.dht.records import store_config, store_record

KEY = RunKey(b"k" * 32)
THIEF = key_of("thief")
networks = pytest.mark.parametrize("kind", ["gloo", "hivemind"])


@asynccontextmanager
async def open_three(kind: str) -> AsyncIterator[tuple[Swarm, Network, Network]]:
    """Islands a and b of a run with a run key, which have met."""
    async with swarm(kind, run_key=KEY) as place:
        a, b = await place.open(A, run_key=KEY), await place.open(B, run_key=KEY)
        for network in (a, b):
            network.messenger.serve("echo", echo)
        await call(b, a)
        yield place, a, b


async def echo(source: Endpoint, body: bytes) -> bytes:
    return source.island.encode()


async def call(caller: Network, callee: Network) -> bytes:
    return await caller.messenger.call(callee.messenger.address, "echo", b"", timeout_seconds=20)


async def is_told(caller: Network, callee: Network, text: str) -> None:
    """Call, in vain, until the reason is told. It may be lost once: it crosses the call that breaks
    the pipe.
    """
    reasons: list[str] = []

    async def is_refused() -> bool:
        with pytest.raises(PeerLost) as refused:
            await call(caller, callee)
        reasons.append(str(refused.value))
        return text in reasons[-1]

    await wait_for(is_refused, True, seconds=20)
    assert text in reasons[-1], reasons


async def has_counted(network: Network, kind: str) -> None:
    """Wait until the network has counted a rejection of this kind."""
    found: list[str] = []

    async def is_counted() -> bool:
        found.extend(reason for _, reason, *_ in network.rejections.drain())
        return kind in found

    await wait_for(is_counted, True, seconds=20)


@networks
def test_no_call_is_heard_in_the_name_of_another_island(kind):
    async def main() -> None:
        async with open_three(kind) as (place, a, b):
            thief = await place.open(B, run_key=KEY, island_key=THIEF)
            await is_told(thief, a, "the name 'b' belongs to the key")
            await has_counted(a, "name")
            assert await call(b, a) == b"b", "the owner of the name is heard as before"

    run(main())


@networks
def test_nobody_answers_in_the_name_of_another_island(kind):
    async def main() -> None:
        async with open_three(kind) as (place, a, _):
            thief = await place.open(B, run_key=KEY, island_key=THIEF)
            thief.messenger.serve("echo", echo)
            with pytest.raises(PeerLost, match="the name 'b' belongs to the key"):
                await call(a, thief)
            await has_counted(a, "name")

    run(main())


@networks
def test_a_record_of_another_key_does_not_displace_an_islands_own(kind):
    async def main() -> None:
        async with open_three(kind) as (place, a, b):
            assert a.membership and b.membership
            await a.membership.announce(member("a"))
            await b.membership.announce(member("b"))
            await wait_for(a.membership.members, {"a": member("a"), "b": member("b")}, seconds=20)
            thief = await place.open(B, run_key=KEY, island_key=THIEF)
            assert thief.membership is not None
            with pytest.raises(InputError, match="'b' is in the run already"):
                await thief.membership.announce(member("b", identity=THIEF.public))
            if kind == "hivemind":  # it need not ask
                auth, body = (
                    PeerAuth(KEY, island=THIEF),
                    member("b", identity=THIEF.public, round=9).encode(),
                )
                await store_record(
                    thief.membership._dht, "run", auth, "b", body, get_dht_time() + 60
                )
                await a.membership.members()
                await has_counted(a, "name")
            assert await a.membership.members() == {"a": member("a"), "b": member("b")}
            restarted = await place.open(B, run_key=KEY)
            assert restarted.membership is not None
            restarted.names.is_newest("b", 1)  # its folder remembers that it has been in the run
            await restarted.membership.announce(member("b", "11111111"))
            await wait_for(
                a.membership.members, {"a": member("a"), "b": member("b", "11111111")}, seconds=20
            )

    run(main())


def test_a_rendezvous_takes_no_records_or_goodbyes_in_the_name_of_another_and_no_old_ones():
    async def main() -> None:
        async with open_three("gloo") as (place, a, b):
            assert a.membership and b.membership
            await b.membership.announce(member("b"))
            await wait_for(a.membership.members, {"b": member("b")}, seconds=20)
            old = sign_record(key_of("b"), "run", member("b", round=7), 1)
            forged = sign_record(THIEF, "run", member("b", round=7), 1 << 52)
            own = sign_record(THIEF, "run", member("b", round=7, identity=THIEF.public), 1 << 52)
            withdrawal = sign_withdrawal(THIEF, "run", member("b"), 1 << 52)
            relabelled = withdrawal.model_copy(update={"key": key_of("b").public})
            speaker, target = a.membership._messenger, place.bootstrap[0].removeprefix("tcp://")
            for kind in ("announce", "beat"):
                for record, text in ((forged, "did not sign"), (own, "belongs to its key")):
                    body = Announcement(run="run", record=record, life_seconds=60).encode()
                    with pytest.raises(MessageError, match=text):
                        await speaker.call(target, kind, body, timeout_seconds=20)
            for goodbye, text in ((withdrawal, "belongs to its key"), (relabelled, "did not sign")):
                with pytest.raises(MessageError, match=text):
                    await speaker.call(target, "leave", goodbye.encode(), timeout_seconds=20)
            body = Announcement(run="run", record=old, life_seconds=60).encode()
            await speaker.call(target, "announce", body, timeout_seconds=20)
            assert await a.membership.members() == {"b": member("b")}

    run(main())


def test_a_value_in_the_dht_can_be_changed_by_its_owner_only():
    async def main() -> None:
        async with open_three("hivemind") as (_, a, b):
            assert a.membership and b.membership
            await b.membership.announce(member("b"))
            dht, later, body = a.membership._dht, get_dht_time() + 60, member("b", round=7).encode()
            subkey = f"b@{key_of('b').public}"
            assert not await dht.store("run/members", body, later, subkey=subkey), (
                "signed by a, and owned by b"
            )
            assert not await dht.store("run/members", body, later, subkey="b"), "owned by nobody"
            assert not await dht.store("run/members", body, later), (
                "a value in the place of all records"
            )
            auth = PeerAuth(KEY, island=key_of("a"))
            await store_record(dht, "run", auth, "a", member("a").encode(), get_dht_time() + 1e6)
            assert await a.membership.members() == {"b": member("b")}, (
                "nothing is stored for so long"
            )

    run(main())


def test_a_vandal_without_the_key_sends_no_island_to_compare_keys():
    async def main() -> None:
        async with open_three("hivemind") as (place, a, b):
            assert a.membership and b.membership
            await a.membership.publish_config("seed: 1")
            stranger = await place.open(Endpoint("vandal", 0), island_key=THIEF)
            assert stranger.membership is not None
            vandal, dht = PeerAuth(None, island=THIEF), stranger.membership._dht
            await store_config(dht, "run", vandal, "seed: 2", get_dht_time() + 200)
            await store_record(dht, "run", vandal, "a", b"{}", get_dht_time() + 200)
            assert await b.membership.read_config() == "seed: 1"
            await a.membership.announce(member("a"))
            await wait_for(b.membership.members, {"a": member("a")}, seconds=20)

    run(main())


def test_a_replayed_record_is_recognised():
    async def main() -> None:
        async with open_three("gloo") as (_, a, _b):
            now = 10 * SLACK_MS
            assert a.names.is_newest("b", now)
            auth = PeerAuth(KEY, a.rejections, names=a.names)
            fresh = sign_record(key_of("b"), "run", member("b", round=3), now + 1)
            replayed = sign_record(key_of("b"), "run", member("b", round=1), now - SLACK_MS - 1)
            assert open_records("run", {"b": fresh}, auth) == {"b": member("b", round=3)}
            assert open_records("run", {"b": replayed}, auth) == {}
            await has_counted(a, "old")

    run(main())


@networks
def test_island_allow_lists_keys_on_both_networks(kind):
    async def main() -> None:
        async with swarm(kind, run_key=KEY) as place:
            a = await place.open(A, run_key=KEY, allow=[key_of("b").public])
            b, c = await place.open(B, run_key=KEY), await place.open(C, run_key=KEY)
            a.messenger.serve("echo", echo)
            assert await call(b, a) == b"b"
            await is_told(c, a, f"c is not in island.allow: its key is {key_of('c').public}")
            await has_counted(a, "peer")

    run(main())


@networks
def test_a_ban_ends_an_open_connection_and_hides_the_record(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(access, "REREAD_SECONDS", 0.0)

    async def main() -> None:
        async with swarm(kind, run_key=KEY) as place:
            a, b = (
                await place.open(A, run_key=KEY, ban_files=[tmp_path / "banned"]),
                await place.open(B, run_key=KEY),
            )
            assert a.membership and b.membership
            for network in (a, b):
                network.messenger.serve("echo", echo)
            await b.membership.announce(member("b"))
            await wait_for(a.membership.members, {"b": member("b")}, seconds=20)
            assert (await call(a, b), await call(b, a)) == (b"a", b"b")
            (tmp_path / "banned").write_text("b\n")
            for caller, callee in ((a, b), (b, a)):
                with pytest.raises(TransportError):
                    await call(caller, callee)
            await has_counted(a, "banned")
            await wait_for(a.membership.members, {}, seconds=20)
            (tmp_path / "banned").unlink()
            assert await call(b, a) == b"b"

    run(main())


def test_one_member_cannot_read_the_keys_of_a_connection_between_two_others():
    """A member in the middle forwards the handshake; what it then adds is refused, although it
    holds the run key.
    """

    async def main() -> None:
        async with open_three("gloo") as (_, a, b):
            host, _, port = a.messenger.address.rpartition(":")
            pumps: list[asyncio.Task[None]] = []
            to_a: list[asyncio.StreamWriter] = []

            async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(1 << 16):
                    writer.write(data)
                writer.close()

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                back, forth = await asyncio.open_connection(host, int(port))
                to_a.append(forth)
                pumps.extend(
                    asyncio.create_task(w) for w in (forward(reader, forth), forward(back, writer))
                )

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            middle = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            assert await b.messenger.call(middle, "echo", b"", timeout_seconds=20) == b"b"
            header = pack_header(Header(Kind.CALL, num_bytes=5), hash_names("run", "control"))
            to_a[0].write(header + b"\4echo" + bytes(16))
            await has_counted(a, "forged")
            server.close()
            for pump in pumps:
                pump.cancel()

    run(main())
