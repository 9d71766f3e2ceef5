"""Islands that share a machine wait for each other, however long it takes until their turn."""

import asyncio
import threading

import pytest

from outer.agreement.messages import Plan
from outer.agreement.running.grace import MissedRounds
from outer.agreement.running.limits import most_missed
from outer.network.deadlines import Deadlines
from outer.network.event_loop import EventLoopThread
from tests.outer.clock import run
from tests.outer.leaders import leaders


def test_no_deadline_passes_on_a_slow_clock():
    loop, changed = EventLoopThread(slowness=1e5), asyncio.Event()

    async def wait() -> bool:
        async with asyncio.timeout(0.01):
            return await changed.wait()

    async def change() -> None:
        changed.set()

    try:
        waiting = loop.start(wait())
        threading.Event().wait(0.1)  # This is ten times the deadline.
        assert not waiting.done()
        loop.run(change())
        assert waiting.result(10)
    finally:
        loop.close()


def test_a_slow_clock_still_goes():
    loop = EventLoopThread(slowness=10.0)
    try:
        loop.run(asyncio.sleep(0.005))
    finally:
        loop.close()


def test_inner_steps_go_on_while_too_few_wait_for_a_round_without_this_island():
    async def test() -> None:
        a, b, c, d = await leaders("abcd", quorum=3)
        for _ in range(3):
            a.deadlines.observe("round", 1.0)
        for waiting, interruption in ((b, ""), (c, ""), (d, "waited for")):
            await waiting.tell(a, waiting.ready())
            assert await a.driver.interruption(1e6, entered_late=False) == interruption

    run(test)


def test_inner_steps_end_for_any_who_would_go_on_below_quorum():
    async def test() -> None:
        a, b = await leaders("ab", quorum=2, below_quorum="continue")
        await b.tell(a, b.ready())
        assert await a.driver.interruption(1e6, entered_late=False) == "waited for"

    run(test)


@pytest.mark.parametrize("waiting", [1, 2, 5, 63])
def test_after_the_most_rounds_that_it_can_miss_an_island_is_waited_for_two_rounds(
    waiting: int,
) -> None:
    deadlines = Deadlines(600.0)
    for _ in range(3):
        deadlines.observe("round", 60.0)
    assert deadlines.grace(waiting, 1, most_missed(waiting)) == 120.0
    assert most_missed(waiting) < 4 * waiting + 1


def test_an_island_on_its_way_is_waited_for_longer_after_two_missed_rounds_and_four_and_eight():
    async def test() -> None:
        a, b, c, d = await leaders("abcd")
        plan = Plan(round=0, attempt=0, planner="a", participants=[a.ready(), b.ready()])
        for waiting, is_coming in ((c, True), (d, False)):
            await waiting.tell(
                a, waiting.knowledge.status.model_copy(update={"is_coming": is_coming})
            )
        missed, found = MissedRounds(a.knowledge), []
        for _ in range(9):
            found.append(missed.to_make_good({"c"}))
            missed.on_commit(plan)
        assert found == [1, 1, 2, 1, 4, 1, 1, 1, 8]
        assert missed.to_make_good({"d"}) == 1, "it has not said that it comes"
        missed.on_commit(Plan(round=0, attempt=1, planner="a", participants=[a.ready(), c.ready()]))
        missed.on_commit(plan)
        assert missed.to_make_good({"c"}) == 1, "it has taken part since"

    run(test)
