"""The training threads' use of a rank's event loop."""

import asyncio

import pytest

from outer.errors import OuterError
from outer.network.event_loop import EventLoopThread


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
