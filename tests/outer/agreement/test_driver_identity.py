"""Who speaks: runs on one network, islands of other configs or of the same name, restarts, and what
is no message.
"""

import asyncio
import logging

import pytest

from outer.agreement.messages import Vote
from outer.agreement.running.failure_detector import PING_SECONDS
from outer.errors import InputError, MessageError
from outer.transports.loopback import Hub
from tests.outer.clock import run, until
from tests.outer.leaders import Leader, die, freeze, leaders, plans_of, together


def test_two_runs_on_one_network_do_not_mix() -> None:
    async def test() -> None:
        hub = Hub()
        one = await leaders("ab", hub, run_id="one", start_islands=2)
        two = await leaders("bc", hub, run_id="two", start_islands=2)
        results = await together(*(i.attempt() for i in one + two))
        assert plans_of(results) == [(0, ["a", "b"], True)] * 2 + [(0, ["b", "c"], True)] * 2
        assert [i.knowledge.present for i in one + two] == [{"b"}, {"a"}, {"c"}, {"b"}]

    run(test)


def test_an_island_with_another_config_is_not_met() -> None:
    async def test() -> None:
        (a,) = await leaders("a")
        (b,) = await leaders("b", a.hub, config_hash="d" * 32)
        await asyncio.sleep(3 * PING_SECONDS)
        assert plans_of(await together(a.attempt(), b.attempt())) == [
            (0, ["a"], True),
            (0, ["b"], True),
        ]

    run(test)


def test_a_second_island_of_the_same_name_is_refused() -> None:
    async def test() -> None:
        (a,) = await leaders("a")
        with pytest.raises(InputError, match="'a'"):
            await Leader(a.hub, "a").announce(identity="f" * 64)

    run(test)


def test_a_restarted_island_takes_its_own_place_in_the_round() -> None:
    async def test() -> None:
        islands = a, b, c = await leaders("abc", start_islands=3)
        await together(*(i.attempt(in_reduce=die) if i is b else i.attempt() for i in islands))
        freeze(b)
        a.hub.heal("b")
        (again,) = await leaders("b", a.hub, start_islands=3, incarnation="01")
        await until(lambda: "b" in a.knowledge.live and "b" in c.knowledge.live)
        early = asyncio.gather(a.attempt(), c.attempt())
        await until(again.hears("ac"))
        results = [await again.attempt(), *await early]
        assert plans_of(results) == [(1, ["a", "b", "c"], True)] * 3
        assert again.incarnation in [p.incarnation for p in results[1][0].participants]

    run(test)


@pytest.mark.parametrize(
    "body,cause",
    [(b"\x00", "not a Vote"), (b"", "not a Vote"), (b"{}", "not a Vote: plan: Field required")],
)
def test_what_is_no_message_is_refused_and_the_round_goes_on(body: bytes, cause: str) -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        with pytest.raises(MessageError, match=cause):
            await b.messenger.call(a.messenger.address, "vote", body, timeout_seconds=5.0)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2

    run(test)


def test_an_island_whose_ready_is_refused_is_told_why_in_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def test() -> None:
        (a,) = await leaders("a", quorum=2)
        await leaders("b", a.hub, max_tokens=5)
        early = asyncio.create_task(a.attempt())
        await asyncio.sleep(3 * PING_SECONDS)
        early.cancel()

    run(test)
    assert "b refused ready: 'a' claims 100 tokens, a round has at most 5" in caplog.messages


def test_nobody_votes_for_another_island() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        plans = await asyncio.gather(a.plan(), b.plan(), c.plan())
        with pytest.raises(MessageError, match="'c' sends a message in the name of 'b'"):
            await c.tell(a, Vote.no(plans[0], "b", "boo"))
        assert a.protocol.vote_table.tally(plans[0]) == "open"

    run(test)
