"""Islands that share a machine wait for each other, however long it takes until their turn."""

import asyncio
import threading

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
