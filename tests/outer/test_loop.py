"""The event loop of a rank, as the training thread uses it."""

import asyncio

import pytest

from outer.errors import OuterError
from outer.loop import LoopThread


@pytest.fixture
def loop():
    thread = LoopThread()
    yield thread
    thread.close()


def test_what_nobody_depends_on_may_take_too_long_and_ends_nothing(loop: LoopThread):
    # Of a goodbye on a busy machine: an island whose run was over ended as failed.
    assert loop.try_to(asyncio.sleep(600), 0.01) is False
    assert loop.try_to(asyncio.sleep(0), 60) is True


def test_an_error_that_is_no_lateness_is_raised(loop: LoopThread):
    async def break_down() -> None:
        raise OuterError("the disk is full")

    with pytest.raises(OuterError, match="the disk is full"):
        loop.try_to(break_down(), 60)
