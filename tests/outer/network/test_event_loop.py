"""The training threads' use of a rank's event loop."""

import asyncio
import threading
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from outer.errors import OuterError
from outer.network.event_loop import EventLoopThread
from tests.outer.islands import GUARD_SECONDS


@pytest.fixture
def loop():
    thread = EventLoopThread()
    yield thread
    thread.close()


def test_what_nobody_depends_on_may_take_too_long_and_ends_nothing(loop: EventLoopThread):
    # Of a goodbye on a busy machine: an island whose run was over ended as failed.
    assert loop.try_to(asyncio.sleep(600), 0.01) is False
    assert loop.try_to(asyncio.sleep(0), 60) is True


def test_an_error_that_is_no_lateness_is_raised(loop: EventLoopThread):
    async def break_down() -> None:
        raise OuterError("the disk is full")

    with pytest.raises(OuterError, match="the disk is full"):
        loop.try_to(break_down(), 60)


def test_a_thread_that_starts_work_while_the_loop_closes_does_not_wait_for_ever() -> None:
    loop, begun = EventLoopThread(), threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.sleep(600)

    def work() -> None:
        for _ in range(2):  # The second time while the loop closes, or after it.
            with suppress(CancelledError, RuntimeError):
                loop.run(wait())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(GUARD_SECONDS)
    loop.close()
    thread.join(GUARD_SECONDS)
    assert not thread.is_alive()
