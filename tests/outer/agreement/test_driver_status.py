"""Islands know of each other which are behind, whose state survives, and which to wait for."""

import asyncio

import pytest

from outer.agreement.messages import Plan, Status
from outer.agreement.running.doubts import FIRST_SECONDS
from outer.agreement.running.failure_detector import PING_SECONDS
from outer.errors import BehindError, QuorumError
from outer.transports.loopback import Hub
from tests.outer.clock import now, run, until
from tests.outer.leaders import START, Leader, leaders, plans_of, split, together

OTHER = "bb" * 16


# -- islands behind --------------------------------------------------------------------------------


def test_an_island_behind_by_a_round_is_told_so() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        for island in (a, b):
            island.enter(3)
        c.enter(2)
        early = asyncio.gather(a.attempt(), b.attempt())
        with pytest.raises(
            BehindError, match=r"a, b in round 3 .* this island in round 2"
        ) as caught:
            await c.attempt()
        assert caught.value.donors == ("a", "b")
        c.enter(3)
        assert plans_of([await c.attempt(), *await early]) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


@pytest.mark.parametrize("name", "abc")
def test_the_island_whose_state_differs_from_most_is_behind_and_the_others_go_on(name: str) -> None:
    async def test() -> None:
        islands = await leaders("abc")
        for island in islands:
            island.enter(3, OTHER if island.name == name else START)
        results = await together(*(i.attempt() for i in islands))
        for island, result in zip(islands, results, strict=True):
            if island.name == name:
                assert isinstance(result, BehindError)
                assert result.donors == tuple(sorted(set("abc") - {name}))
                island.take_state(split(islands, name)[1][0])
            else:
                assert plans_of([result]) == [(0, sorted(set("abc") - {name}), True)]

    run(test)


@pytest.mark.parametrize("is_lost", [False, True], ids=["left", "lost"])
def test_an_island_ahead_that_is_gone_holds_nobody_up(is_lost: bool) -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        c.enter(1)
        await until(lambda: a.hears("c", "status")() or "c" in a.knowledge.statuses)
        if is_lost:
            c.hub.lose("c")
        else:
            await c.say_goodbye()
        await until(
            lambda: not a.knowledge.live.keys() & {"c"} and not b.knowledge.live.keys() & {"c"}
        )
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2

    run(test)


def test_an_island_that_is_behind_takes_part_in_no_plan() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        c.enter(1)
        with pytest.raises(BehindError):
            await a.attempt()
        # b knows nothing of c and counts a in.
        plan = Plan(round=0, attempt=0, planner="b", participants=[a.ready(), b.ready()])
        b.protocol.prepare(b.ready())
        await b.tell(a, plan)
        await until(lambda: (plan.id, "a") in b.protocol.vote_table.votes)
        assert b.protocol.vote_table.votes[plan.id, "a"].digest is None

    run(test)


def test_a_claim_that_nobody_can_make_good_holds_up_no_round_and_is_believed_again_later() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        c.enter(7, OTHER, tokens=1 << 60)
        for island in (a, b):
            with pytest.raises(BehindError):
                await island.attempt()
            await island.driver.disbelieve(await island.driver.find_donors())
            assert await island.driver.find_donors() == []
        started = now()
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2
        assert now() - started < PING_SECONDS
        await asyncio.sleep(FIRST_SECONDS)
        assert [donor.island for donor in await a.driver.find_donors()] == ["c"]

    run(test)


# -- in the inner steps, and at the end ------------------------------------------------------------


def test_inner_steps_go_on_while_nobody_waits_or_waiting_is_worth_it() -> None:
    async def test() -> None:
        a, b = await leaders("ab", wait_seconds=60.0)
        assert await a.driver.interruption(1e6, entered_late=True) == ""
        await b.tell(a, b.ready())
        assert await a.driver.interruption(59.0, entered_late=False) == ""

    run(test)


@pytest.mark.parametrize("seconds_left,entered_late", [(61.0, False), (1.0, True)])
def test_inner_steps_end_when_others_wait_in_vain(seconds_left: float, entered_late: bool) -> None:
    async def test() -> None:
        a, b = await leaders("ab", wait_seconds=60.0)
        await b.tell(a, b.ready())
        assert await a.driver.interruption(seconds_left, entered_late=entered_late) == "waited for"

    run(test)


def test_the_more_islands_wait_the_sooner_inner_steps_end() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        for _ in range(3):
            a.deadlines.observe("round", 60.0)
        await b.tell(a, b.ready())
        assert await a.driver.interruption(45.0, entered_late=False) == ""
        await c.tell(a, c.ready())
        assert await a.driver.interruption(45.0, entered_late=False) == "waited for"

    run(test)


def test_inner_steps_do_not_end_for_islands_that_are_lost() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.tell(a, b.ready())
        a.hub.lose("b")
        await until(lambda: not a.knowledge.live)
        assert await a.driver.interruption(1e6, entered_late=True) == ""

    run(test)


def test_inner_steps_end_when_another_history_survives() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.driver.update_status(Status(round=1, tokens=200, digest=OTHER))
        await until(lambda: a.knowledge.live.get("b") == b.knowledge.status)
        assert await a.driver.interruption(1.0, entered_late=False) == "behind"

    run(test)


def test_at_the_end_an_island_stays_until_the_others_have_the_last_round() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await until(lambda: "b" in a.knowledge.live)
        a.enter(1)
        staying = asyncio.create_task(a.driver.linger(60.0))
        await asyncio.sleep(20)
        assert not staying.done()
        await b.driver.update_status(a.knowledge.status)
        assert await staying is False
        assert now() < 25

    run(test)


def test_at_the_end_nobody_is_waited_for_longer_than_asked() -> None:
    async def test() -> None:
        a, _ = await leaders("ab")
        await until(lambda: "b" in a.knowledge.live)
        a.enter(1)
        assert await a.driver.linger(10.0) is False
        assert 10 <= now() < 15

    run(test)


def test_at_the_end_islands_that_are_gone_are_not_waited_for() -> None:
    async def test() -> None:
        a, _, c = await leaders("abc")
        await until(lambda: len(a.knowledge.live) == 2)
        a.enter(1)
        a.hub.lose("b")
        await c.say_goodbye()
        assert await a.driver.linger(60.0) is False
        assert now() < 5

    run(test)


def test_at_the_end_an_island_behind_is_told_so() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.driver.update_status(Status(round=1, tokens=200, digest=OTHER))
        await until(lambda: a.knowledge.live.get("b") == b.knowledge.status)
        assert await a.driver.linger(60.0) is True

    run(test)


# -- donors ----------------------------------------------------------------------------------------


async def donors_of(island: Leader) -> list[str]:
    return [member.island for member in await island.driver.find_donors()]


def test_the_donors_of_an_island_that_nobody_has_spoken_to_are_in_the_records() -> None:
    async def test() -> None:
        hub = Hub()
        for name, round_number in [("a", 1), ("b", 2), ("c", 2)]:
            island = Leader(hub, name)
            island.enter(round_number)
            await island.announce()
        assert await donors_of(Leader(hub, "d")) == ["b", "c"]

    run(test)


def test_an_island_with_a_state_takes_none_from_a_record_whose_island_has_not_spoken() -> None:
    async def test() -> None:
        hub = Hub()
        dead, again = Leader(hub, "a"), Leader(hub, "b")
        dead.enter(2)
        await dead.announce()
        again.enter(1)
        assert await donors_of(again) == []

    run(test)


def test_a_record_of_a_lost_island_makes_no_donor() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        a.enter(1)
        await a.announce()
        await until(lambda: "a" in b.knowledge.present)
        a.hub.lose("a")
        await until(lambda: "a" in b.knowledge.lost)
        b.knowledge.statuses.clear()
        assert await donors_of(b) == []

    run(test)


def test_an_island_that_has_committed_no_less_than_the_others_has_no_donors() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        a.enter(1)
        await until(lambda: b.knowledge.statuses.get("a") == a.knowledge.status)
        assert await donors_of(a) == []
        assert await donors_of(b) == ["a"]

    run(test)


def test_donors_that_have_spoken_count_more_than_records() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        # The record of c is older than the loss of its state.
        await c.announce(round=5, tokens=500)
        await b.driver.update_status(Status(round=1, tokens=200, digest=OTHER))
        await until(lambda: a.knowledge.live.get("b") == b.knowledge.status)
        assert await donors_of(a) == ["b"]

    run(test)


# -- islands that begin with other parameters ------------------------------------------------------


def test_islands_that_begin_with_other_parameters_are_both_told_at_once_and_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        a, b = await leaders("ab", wait_seconds=20.0, start_islands=2)
        b.enter(0, OTHER)
        await until(lambda: len(caplog.messages) == 2)
        assert now() < 2 * PING_SECONDS, "not only when the inner steps are done"
        for ended in await together(a.attempt(), b.attempt()):
            assert isinstance(ended, QuorumError), "and not that it cannot take the other's state"
            assert all(digest[:12] in str(ended) for digest in (START, OTHER))

    run(test)
    first = (
        f"round 0: b with digest {OTHER[:12]} and this island with {START[:12]} begin with other "
        "parameters, and "
        "cannot average them. Start the islands again: with the same seed, set before the model "
        "and its adapters are "
        "made; or with the same weights (model.init_from, or one checkpoint that all of them "
        "load); or one of them "
        "alone (outer.start_islands=1) and the others with island.joins=true, which take its "
        "weights"
    )
    second = (
        f"round 0: a with digest {START[:12]} and this island with {OTHER[:12]} begin with "
        "other parameters"
    )
    of_b, of_a = sorted(caplog.messages[:2])
    assert of_a == first
    assert of_b.startswith(second)


def test_an_island_that_comes_back_with_the_right_parameters_begins_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        b.enter(0, OTHER)
        early = asyncio.create_task(a.attempt())
        await until(lambda: "b" in a.protocol.knowledge.statuses and len(caplog.messages) == 2)
        await b.say_goodbye()
        (b,) = await leaders("b", a.hub, start_islands=2, incarnation="01")
        assert plans_of([await b.attempt(), await early]) == [(0, ["a", "b"], True)] * 2

    run(test)
    assert len(caplog.messages) == 2


def test_one_with_other_parameters_takes_those_of_the_others_after_their_first_round() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=2)
        b.enter(0, OTHER)
        early = asyncio.create_task(b.attempt())
        assert plans_of(await together(a.attempt(), c.attempt())) == [(0, ["a", "c"], True)] * 2
        with pytest.raises(BehindError, match="a, c in round 1"):
            await early

    run(test)
