import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from outer.connect.meeting import find_runs
from outer.errors import DifferingConfigsError, InputError
from outer.membership.base import Membership
from outer.membership.records import MAX_CONFIG_BYTES
from outer.network.endpoints import Endpoint
from outer.packages import has_hivemind
from tests.outer.nets import (
    KINDS,
    TLS_IN_DHT,
    A,
    B,
    C,
    RemotePeer,
    Swarm,
    key_of,
    member,
    run,
    serve_dht,
    swarm,
)

if has_hivemind():
    from hivemind.utils.timed_storage import get_dht_time

    from outer.membership.dht.membership import HivemindMembership
    from outer.membership.dht.owned_records import make_subkey
    from outer.membership.dht.records import store_config

all_kinds = pytest.mark.parametrize(
    "kind", [*KINDS, pytest.param(TLS_IN_DHT, marks=pytest.mark.slow)]
)
ANOTHER = "11111111"


@asynccontextmanager
async def open_two(kind: str) -> AsyncIterator[tuple[Swarm, Membership, Membership]]:
    """Open the memberships of islands a and b."""
    async with swarm(kind) as place:
        a, b = (await place.open(A)).membership, (await place.open(B)).membership
        assert a is not None
        assert b is not None
        yield place, a, b


async def wait_for(read: Callable[[], Awaitable[Any]], expected: Any, seconds: float = 5) -> None:
    """Wait until `read` returns the expected value, because records take a moment to arrive."""
    async with asyncio.timeout(seconds):
        while await read() != expected:  # noqa: ASYNC110 - records set no event
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", [*KINDS, TLS_IN_DHT])
def test_islands_see_each_others_records(kind):
    async def main() -> None:
        async with open_two(kind) as (_, a, b):
            ours, theirs = member("a"), member("b", ANOTHER, round=5)
            await a.announce(ours)
            await b.announce(theirs)
            for membership in (a, b):
                await wait_for(membership.members, {"a": ours, "b": theirs})

    run(main())


@all_kinds
def test_a_record_can_be_changed(kind):
    async def main() -> None:
        async with open_two(kind) as (_, a, b):
            await a.announce(member("a"))
            await a.announce(member("a", round=9))
            await wait_for(b.members, {"a": member("a", round=9)})

    run(main())


@all_kinds
def test_an_island_that_leaves_is_gone_at_once_and_may_come_back(kind):
    async def main() -> None:
        async with open_two(kind) as (_, a, b):
            await a.announce(member("a"))
            await wait_for(b.members, {"a": member("a")})
            await a.leave()
            await a.leave()
            await wait_for(b.members, {}, seconds=2)
            await a.announce(member("a", ANOTHER))
            await wait_for(b.members, {"a": member("a", ANOTHER)})

    run(main())


@all_kinds
def test_a_second_island_of_the_same_name_is_refused(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, twin = (
                (await place.open(A)).membership,
                (await place.open(A, island_key=key_of("twin"))).membership,
            )
            assert a and twin
            await a.announce(member("a"))
            with pytest.raises(
                InputError, match=r"'a' is in the run already.* choose another name"
            ):
                await twin.announce(member("a", ANOTHER, identity=key_of("twin").public))

    run(main())


@all_kinds
def test_a_restarted_island_takes_its_own_place_at_once(kind):
    async def main() -> None:
        async with open_two(kind) as (place, a, b):
            again = (await place.open(A)).membership
            assert again is not None
            await a.announce(member("a"))
            restarted = member("a", ANOTHER, round=4)
            await again.announce(restarted)
            await wait_for(b.members, {"a": restarted})
            assert await a.members() == {"a": member("a")}

    run(main())


@all_kinds
def test_a_record_changes_in_the_background_until_its_island_leaves(kind):
    async def main() -> None:
        async with open_two(kind) as (_, a, b):
            await a.announce(member("a"))
            a.update(member("a", round=2))
            assert await a.members() == {"a": member("a", round=2)}
            await wait_for(b.members, {"a": member("a", round=2)})
            await a.leave()
            a.update(member("a", round=3))
            assert await a.members() == {}
            await b.announce(member("b"))
            await wait_for(a.members, {"b": member("b")})

    run(main())


def test_a_lost_island_knows_what_it_knew_and_is_back_when_healed():
    async def main() -> None:
        async with open_two("loopback") as (place, a, b):
            both = {"a": member("a"), "b": member("b")}
            await a.announce(both["a"])
            await b.announce(both["b"])
            assert await a.members() == both
            place.hub.lose("a")
            assert await b.members() == {"b": both["b"]}
            await b.leave()
            assert await a.members() == both
            place.hub.heal("a")
            assert await a.members() == {"a": both["a"]}
            assert await b.members() == {"a": both["a"]}

    run(main())


@all_kinds
def test_the_first_config_wins(kind):
    async def main() -> None:
        async with open_two(kind) as (_, a, b):
            assert await a.read_config() is None
            await a.publish_config("model: {}\n")
            await b.publish_config("model: {layers: 3}\n")
            for membership in (a, b):
                assert await membership.read_config() == "model: {}\n"

    run(main())


@all_kinds
def test_a_config_that_is_too_long_is_refused(kind):
    async def main() -> None:
        async with open_two(kind) as (_, a, _b):
            with pytest.raises(InputError, match=f"at most {MAX_CONFIG_BYTES}"):
                await a.publish_config("x" * (MAX_CONFIG_BYTES + 1))

    run(main())


@all_kinds
def test_two_runs_of_one_swarm_do_not_meet(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = (
                (await place.open(A)).membership,
                (await place.open(B, run_id="another")).membership,
            )
            assert a is not None
            assert b is not None
            await a.announce(member("a"))
            await a.publish_config("one")
            await b.announce(member("b"))
            assert await b.read_config() is None
            assert await a.members() == {"a": member("a")}
            assert await b.members() == {"b": member("b")}

    run(main())


MALFORMED = [b"", b"{}", b"\xff", member("other").model_dump_json().encode()]


def test_a_malformed_record_is_left_out_of_a_dht():
    async def main() -> None:
        async with open_two("hivemind") as (_, a, b):
            await a.announce(member("a"))
            for later, raw in enumerate([*MALFORMED, "text", 7]):
                subkey = f"b@{key_of('b').public}"
                assert await b._dht.store(
                    "run/members", raw, get_dht_time() + 30 + later, subkey=subkey
                )
                assert await a.members() == {"a": member("a")}

    run(main())


@pytest.mark.parametrize("kind", ["gloo", "hivemind"])
def test_a_killed_island_vanishes_and_its_name_remains_its_own(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a = (await place.open(A)).membership
            assert a is not None
            await a.announce(member("a"))
            peer = RemotePeer(kind, place.bootstrap)
            try:
                await peer.hear()
                await wait_for(a.members, {"a": member("a"), "b": member("b")})
            finally:
                peer.kill()
            await wait_for(a.members, {"a": member("a")}, seconds=20)
            other = await place.open(B, island_key=key_of("other"))
            assert other.membership is not None
            with suppress(InputError):
                await other.membership.announce(
                    member("b", ANOTHER, identity=key_of("other").public)
                )
            again = await place.open(B)
            assert again.membership is not None
            assert again.names.is_newest("b", 1), "its folder remembers that it has been in the run"
            await again.membership.announce(member("b", ANOTHER))
            await wait_for(a.members, {"a": member("a"), "b": member("b", ANOTHER)}, seconds=20)

    run(main())


@pytest.mark.parametrize(
    "kind", ["gloo", "hivemind", pytest.param(TLS_IN_DHT, marks=pytest.mark.slow)]
)
def test_a_visitor_finds_runs_configs_and_islands_by_an_address_alone(kind):
    async def main() -> None:
        async with open_two(kind) as (place, a, b):
            assert await find_runs(place.bootstrap[0], connect_seconds=5) == {}
            await a.announce(member("a"))
            await b.announce(member("b"))
            await a.publish_config("seed: 1\n")
            runs = await find_runs(place.bootstrap[0], connect_seconds=5)
            assert list(runs) == ["run"]
            assert runs["run"].config_text == "seed: 1\n"
            assert runs["run"].islands == ("a", "b")

    run(main())


def test_invented_runs_do_not_hide_a_run_that_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outer.membership.dht.records.MAX_LISTED_RUNS", 2)

    async def main() -> None:
        async with open_two("hivemind") as (place, a, b):
            await a.announce(member("a"))
            await a.publish_config("seed: 1\n")
            c = (await place.open(C)).membership
            for number in range(6):
                for stranger in (b, c):
                    subkey = make_subkey(f"0-invented-{number}", stranger._auth.island)
                    assert await stranger._dht.store(
                        "diloco/runs", b"", get_dht_time() + 60, subkey=subkey
                    )
            assert list(await find_runs(place.bootstrap[0], 5, run_name="run")) == ["run"]
            assert len(await find_runs(place.bootstrap[0], 5)) <= 2

    run(main())


def test_the_number_of_keys_decides_nothing_about_a_runs_config() -> None:
    async def main() -> None:
        async with open_two("hivemind") as (place, a, b):
            c, d = [(await place.open(each)).membership for each in (C, Endpoint("d", 0))]
            await a.publish_config("seed: 1\n")
            for stranger in (c, d):
                await store_config(
                    stranger._dht, "run", stranger._auth, "seed: 666\n", get_dht_time() + 60
                )
            assert await a.read_config() == "seed: 1\n"
            with pytest.raises(DifferingConfigsError, match="2 different configs of run 'run'"):
                await b.read_config()
            with pytest.raises(DifferingConfigsError):
                await find_runs(place.bootstrap[0], 5, run_name="run")
            await b.publish_config("seed: 1\n")
            assert await b.read_config() == "seed: 1\n"

    run(main())


def test_a_swarm_goes_on_without_the_one_that_began_it():
    async def main() -> None:
        async with swarm("hivemind") as place:
            first, a, b = (
                await place.open(Endpoint("first", 0)),
                await place.open(A),
                await place.open(B),
            )
            assert first.membership and a.membership and b.membership
            await first.membership.publish_config("text")
            await a.membership.publish_config("text")
            await a.membership.announce(member("a"))
            await first.close()
            await b.membership.announce(member("b"))
            await wait_for(a.membership.members, {"a": member("a"), "b": member("b")}, seconds=10)
            assert await b.membership.read_config() == "text"

    run(main())


def test_an_island_whose_node_nobody_reaches_only_asks_the_dht_and_is_seen():
    async def main() -> None:
        async with swarm(TLS_IN_DHT) as place:
            a, b = await place.open(A), await place.open(B, announce_host="127.0.0.1")
            assert isinstance(a.membership, HivemindMembership) and isinstance(
                b.membership, HivemindMembership
            )
            assert (
                not a.membership._dht.protocol.client_mode
                and b.membership._dht.protocol.client_mode
            )
            await b.membership.announce(member("b"))
            await wait_for(a.membership.members, {"b": member("b")})

    run(main())


def test_a_proxy_does_not_lead_into_a_dht():
    async def main() -> None:
        async with swarm(TLS_IN_DHT) as place:
            with pytest.raises(
                InputError, match=r"island.proxy does not lead; .* --rendezvous tcp"
            ):
                await place.open(A, proxy="http://127.0.0.1:9")

    run(main())


@pytest.mark.slow
def test_islands_over_tls_stay_together_when_the_peer_that_they_met_by_has_died():
    async def main() -> None:
        peer = await serve_dht()
        place = Swarm("tls", "run", 10, list(peer.addresses))
        a, b = await place.open(A), await place.open(B)
        assert isinstance(a.membership, HivemindMembership) and isinstance(
            b.membership, HivemindMembership
        )
        tables = [one.membership._dht.protocol.routing_table for one in (a, b)]
        await a.membership.announce(member("a"))
        await b.membership.announce(member("b"))
        await wait_for(b.membership.members, {"a": member("a"), "b": member("b")})
        async with asyncio.timeout(30):
            while not all(len(one.membership._peers) == 2 for one in (a, b)):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.1)
        await peer.close()
        for table in tables:  # as a cut between the two leaves them
            for peer_id in list(table.peer_id_to_uid):
                del table[table.get(peer_id=peer_id)]
        async with asyncio.timeout(30):
            while not all(len(table.peer_id_to_uid) == 1 for table in tables):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.1)
        a.membership.update(member("a", round=7))
        await wait_for(
            b.membership.members, {"a": member("a", round=7), "b": member("b")}, seconds=10
        )
        for one in (a, b):
            await one.close()

    run(main())


def test_a_visit_to_a_wrong_address_says_what_is_right():
    with pytest.raises(InputError, match=r"'somewhere'; allowed: /ip4/.* or tcp://"):
        run(find_runs("somewhere", 1))
