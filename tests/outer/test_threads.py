"""Threads that are made at the start."""

import os

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
