"""Islands at a rendezvous that dies, comes back empty, or is one of several."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outer.connect.meeting import find_runs
from outer.errors import InputError
from outer.membership.records import Records, RunInfo, sign_record
from outer.membership.rendezvous import Rendezvous, serve_rendezvous
from outer.membership.rendezvous_link import RendezvousLink
from outer.membership.tcp import TcpMembership, open_membership
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import ROOT, A, B, C, Swarm, key_of, member, run
from tests.outer.rendezvous import open_memberships, rendezvous


class Bootstrap:
    """A `diloco bootstrap --rendezvous tcp` process."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "diloco",
                "bootstrap",
                "--rendezvous",
                "tcp",
                "--port",
                str(port),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().removeprefix("address: ").strip()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@asynccontextmanager
async def open_at_one(*islands: str) -> AsyncIterator[tuple[list[Rendezvous], list[TcpMembership]]]:
    """Open memberships at one rendezvous, which `restart` may replace in the list."""
    servers = [serve_rendezvous("127.0.0.1", 0)]
    try:
        async with open_memberships(
            *((island, [servers[0].address]) for island in islands)
        ) as memberships:
            yield servers, memberships
    finally:
        servers[0].close()


async def restart(servers: list[Rendezvous], log: pytest.LogCaptureFixture) -> None:
    """Replace the rendezvous by another at the same address, once its loss is noticed. Waits until
    that is noticed.
    """

    async def is_said(words: str) -> bool:
        return any(
            words in record.message
            for record in log.records
            if record.name == "outer.membership.rendezvous_link"
        )

    servers[0].close()
    await wait_for(lambda: is_said("is lost"), True)
    servers[0] = serve_rendezvous("127.0.0.1", int(servers[0].address.rpartition(":")[2]))
    await wait_for(lambda: is_said("answers again"), True)


def test_a_run_goes_on_while_its_rendezvous_is_dead_and_fills_the_next():
    async def main() -> None:
        server = await asyncio.to_thread(Bootstrap)
        place = Swarm("gloo", "run", 10, [server.address])
        try:
            a, b = await place.open(A), await place.open(B)
            assert a.membership
            assert b.membership
            await a.membership.publish_config("seed: 1\n")
            both = {"a": member("a"), "b": member("b")}
            await a.membership.announce(both["a"])
            await b.membership.announce(both["b"])
            await wait_for(a.membership.members, both)
            await wait_for(b.membership.members, both)
            server.kill()
            addresses = {A: a.transport.address, B: b.transport.address}
            await asyncio.gather(*(n.transport.connect("1", addresses) for n in (a, b)))
            both["a"] = member("a", round=7)
            a.membership.update(both["a"])
            assert await b.membership.members() == {"a": member("a"), "b": member("b")}
            server = await asyncio.to_thread(Bootstrap, server.port)
            await wait_for(b.membership.members, both, seconds=15)
            c = await place.open(C)
            assert c.membership is not None
            await wait_for(c.membership.members, both)
            await wait_for(c.membership.read_config, "seed: 1\n")
        finally:
            for network in reversed(place.networks):
                await network.close()
            server.kill()

    run(main())


def test_the_loss_of_a_rendezvous_is_said_once_and_so_is_its_return(caplog):
    caplog.set_level(logging.INFO, logger="outer.membership")

    async def main() -> None:
        async with open_at_one("a") as (server, (a,)):
            await a.announce(member("a"))
            await restart(server, caplog)
            assert await a.members() == {"a": member("a")}
        levels = [r.levelno for r in caplog.records if "rendezvous" in r.message]
        assert levels == [logging.WARNING, logging.INFO]

    run(main())


def test_a_rendezvous_that_comes_back_empty_is_told_config_and_records(caplog):
    caplog.set_level(logging.INFO, logger="outer.membership")

    async def main() -> None:
        async with open_at_one("a") as (server, (a,)):
            await a.announce(member("a"))
            await a.publish_config("text")
            await restart(server, caplog)
            await wait_for(
                lambda: find_runs(server[0].address, 5), {"run": RunInfo("text", ("a",))}
            )

    run(main())


def test_a_rendezvous_that_comes_back_empty_is_not_believed_at_once(caplog):
    caplog.set_level(logging.INFO, logger="outer.membership")

    async def main() -> None:
        async with open_at_one("a", "b") as (server, (a, b)):
            await b.announce(member("b"))
            await wait_for(a.members, {"b": member("b")})
            await b.close()
            await restart(server, caplog)
            assert await a.members() == {"b": member("b")}
            await wait_for(a.members, {})

    run(main())


def test_another_process_at_the_same_address_is_noticed_without_a_loss():
    link = RendezvousLink("tcp://127.0.0.1:1", grace_seconds=60)
    link.on_answer(
        Records(server="1", version=5, records={}, is_whole=True, has_config=True),
        {"b": member("b")},
    )
    link.on_answer(
        Records(server="1", version=6, records={}, is_whole=True, has_config=True),
        {"c": member("c")},
    )
    assert link.known() == {"c": member("c")}
    link.on_answer(Records(server="2", version=7, records={}, is_whole=True, has_config=False), {})
    assert link.known() == {"c": member("c")}
    assert link.wake.is_set()


def test_a_link_keeps_what_has_not_changed_and_drops_what_is_gone_or_refused():
    link = RendezvousLink("tcp://127.0.0.1:1", grace_seconds=60)
    signed = {name: sign_record(key_of(name), "run", member(name), 1) for name in "abcd"}
    whole = Records(server="1", version=5, records=signed, is_whole=True, has_config=True)
    link.on_answer(whole, {name: member(name) for name in "abcd"})
    changed = {"b": signed["b"], "d": signed["d"]}
    part = Records(
        server="1", version=9, records=changed, gone=["c"], is_whole=False, has_config=True
    )
    link.on_answer(part, {"b": member("b", round=2)})
    assert link.known() == {"a": member("a"), "b": member("b", round=2)}, "d is refused"
    assert link.version == 9


def test_one_of_several_rendezvous_is_enough():
    async def main() -> None:
        with rendezvous(2) as (first, second):
            first.close()
            both = [first.address, second.address]
            async with open_memberships(("a", both), ("b", [second.address])) as (a, b):
                await a.announce(member("a"))
                await a.publish_config("text")
                await wait_for(b.members, {"a": member("a")})
                assert await b.read_config() == "text"

    run(main())


def test_records_of_all_rendezvous_count():
    async def main() -> None:
        with rendezvous(2) as (first, second):
            places = (
                ("a", [first.address]),
                ("b", [second.address]),
                ("c", [first.address, second.address]),
            )
            async with open_memberships(*places) as (a, b, c):
                await a.announce(member("a"))
                await b.announce(member("b"))
                await wait_for(c.members, {"a": member("a"), "b": member("b")})
                first.close()
                await wait_for(c.members, {"b": member("b")})
                second.close()
                await wait_for(lambda: known_up(c), False)
                assert await c.members() == {"a": member("a"), "b": member("b")}

    async def known_up(membership: TcpMembership) -> bool:
        return any(link.is_up for link in membership._links)

    run(main())


def test_an_island_announces_itself_while_no_rendezvous_answers_and_is_known_when_one_is_back():
    async def main() -> None:
        with rendezvous(1) as (server,):
            async with open_memberships(("a", [server.address])) as (a,):
                server.close()
                await a.announce(member("a"))
                restarted = serve_rendezvous("127.0.0.1", int(server.address.rpartition(":")[2]))
                try:
                    async with open_memberships(("b", [server.address])) as (b,):
                        await wait_for(b.members, {"a": member("a")})
                finally:
                    restarted.close()

    run(main())


def test_all_addresses_are_named_when_none_answers():
    with pytest.raises(
        InputError, match=r"tcp://127.0.0.1:1, tcp://127.0.0.1:2 did not answer within 0.3 s \(.*\)"
    ):
        run(
            open_membership(
                ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], "run", A, 1, connect_seconds=0.3
            )
        )


def test_a_restarted_island_takes_its_place_at_once_and_its_old_process_does_not_take_it_back(
    caplog,
):
    async def refused() -> bool:
        return any("was restarted" in r.message for r in caplog.records)

    async def main() -> None:
        with rendezvous(1) as (server,):
            at = [server.address]
            async with open_memberships(("a", at), ("a", at), ("b", at)) as (old, new, other):
                first = member("a", "11111111")
                second = member("a", "22222222", round=3)
                await old.announce(first)
                await wait_for(other.members, {"a": first})
                await new.announce(second)
                await wait_for(other.members, {"a": second})
                old.update(member("a", "11111111", round=9))
                await wait_for(refused, True)
                await old.leave()
                assert await other.members() == {"a": second}

    run(main())


def test_an_island_that_falls_silent_expires():
    async def main() -> None:
        with rendezvous(1) as (server,):
            async with open_memberships(("a", [server.address]), ("b", [server.address])) as (a, b):
                await a.announce(member("a"))
                await b.announce(member("b"))
                await wait_for(b.members, {"a": member("a"), "b": member("b")})
                await a.close()
                await wait_for(b.members, {"b": member("b")})

    run(main())
