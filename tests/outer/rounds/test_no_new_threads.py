"""A round needs no new thread: an island that makes one for each stands still when there is none to
be had.
"""

import subprocess
import sys
import threading

import pytest

from outer.network.event_loop import WaitingThreads
from outer.threads import ThreadWorker, start_thread
from tests.outer.without_threads import NUM_ROUNDS


def test_rounds_go_on_in_a_process_that_can_make_no_more_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.outer.without_threads"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == f"can't start new thread\n{NUM_ROUNDS} rounds\n", done.stderr


def test_a_worker_does_one_work_after_another_in_one_thread() -> None:
    worker, threads = ThreadWorker("test rounds"), []
    pieces = [worker.start(lambda: threads.append(threading.get_ident())) for _ in range(3)]
    for piece in pieces:
        piece.join()
    assert len(threads) == 3 and len(set(threads)) == 1


def test_a_worker_goes_on_after_a_work_that_raises() -> None:
    def raises() -> None:
        raise MemoryError

    worker, seen = ThreadWorker("test rounds"), []
    worker.start(raises).join()
    worker.start(lambda: seen.append(1)).join()
    assert seen == [1]


def test_who_waits_for_a_worker_whose_thread_is_gone_is_told_so() -> None:
    def end_the_thread() -> None:
        raise SystemExit

    worker = ThreadWorker("test rounds")
    worker.start(end_the_thread).join()
    with pytest.raises(
        RuntimeError, match="the thread 'test rounds' has ended before its work was done"
    ):
        worker.start(lambda: None).join()


def test_a_workers_thread_ends_when_nobody_holds_the_worker() -> None:
    worker = ThreadWorker("test rounds")
    has_ended = worker._has_ended
    del worker
    assert has_ended.wait(60)


def test_a_thread_that_dies_before_it_begins_is_not_waited_for_without_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outer.threads._thread.start_new_thread", lambda *_: 0)
    with pytest.raises(
        RuntimeError, match=r"has not begun within 0.01 s: there may be too little memory"
    ):
        start_thread(lambda: None, "stillborn", seconds=0.01)


def test_a_wait_that_gets_no_thread_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waiters, done = WaitingThreads(), []
    monkeypatch.setattr("outer.threads._thread.start_new_thread", _refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        waiters.start(lambda: done.append("refused"))
    monkeypatch.undo()
    is_over = threading.Event()

    def end() -> None:
        is_over.set()

    waiters.start(end)
    assert is_over.wait(60) and done == []
    waiters.close()


def _refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")
