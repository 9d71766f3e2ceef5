"""Threads that are waited for with a limit, and workers that need no new thread."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inner.threads import Worker, start_thread

STACK_BYTES, SPARE_BYTES = 1 << 30, 1 << 28
"""Room for what a test computes is left, and none for the stack of another thread."""


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Inside, this process has no memory for another thread."""
    before, stack = resource.getrlimit(resource.RLIMIT_AS), threading.stack_size(STACK_BYTES)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        threading.stack_size(stack)


def test_a_thread_runs_its_work_and_says_when_it_has_ended():
    found = list[int]()
    assert start_thread(lambda: found.append(1), "sums").wait(60)
    assert found == [1]


def test_where_there_can_be_no_new_thread_that_is_an_error_and_no_wait():
    with no_new_threads(), pytest.raises(RuntimeError, match="'sums'"):
        start_thread(lambda: None, "sums", seconds=0.5)


def test_a_worker_works_where_there_can_be_no_new_thread():
    worker = Worker("sums")
    with no_new_threads():
        assert worker.submit(lambda: 1 + 1).result(60) == 2
    worker.close()


def test_a_worker_goes_on_after_work_that_raises():
    worker = Worker("sums")
    with pytest.raises(MemoryError):
        worker.submit(run_out_of_memory).result(60)
    assert worker.submit(lambda: 3).result(60) == 3
    worker.close()


def run_out_of_memory() -> None:
    raise MemoryError


def test_a_closed_worker_does_what_was_submitted_and_ends_its_thread():
    worker = Worker("sums")
    last = worker.submit(lambda: 4)
    worker.close()
    assert last.result(60) == 4
    assert worker.has_ended.wait(60)
