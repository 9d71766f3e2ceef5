"""Threads that are made at the start."""

import os

import pytest

from outer.network.event_loop import EventLoopThread, assert_on_loop
from outer.threads import ProcessExecutor


def test_a_forked_process_has_a_thread_of_its_own_in_the_executor():
    executor = ProcessExecutor("test")
    executor.make_thread()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            executor.make_thread()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    executor.executor.shutdown()


def test_a_state_of_the_event_loop_may_be_touched_by_its_tasks_only():
    loop = EventLoopThread()
    loop.call(assert_on_loop)
    with pytest.raises(AssertionError, match="belongs to the event loop"):
        assert_on_loop()
    loop.close()
