"""Threads with a limited wait for their start, and a thread that is created once and then does one
task after another.

`Thread.start` waits without limit until the new thread reports that it runs. A thread that dies for
lack of memory before that never reports it (CPython's gh-140746), so an island that created a
thread for each round could hang after a short lack of memory. A worker's thread is created at the
start of the process, when there is memory.
"""

import _thread
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

log = logging.getLogger(__name__)

START_SECONDS = 10.0
"""The time in which a new thread must begin. On a busy machine it takes milliseconds."""
POLL_SECONDS = 1.0


class Joinable(Protocol):
    """A task that has been started in another thread."""

    def join(self) -> None:
        """Block until the task has ended."""


class Worker(Protocol):
    """Interface of a thread that does one task after another, in the order of the calls."""

    def start(self, work: Callable[[], None]) -> Joinable:
        """Run `work`, which must not raise, after all earlier tasks. The process does not wait
        for it at its end.
        """
        ...


def start_thread(
    work: Callable[[], None], name: str, seconds: float = START_SECONDS
) -> threading.Event:
    """Run `work` in a new daemon thread. The returned event is set when the thread has ended, in
    any way.

    Raises RuntimeError, which contains `name`, if no thread can be created now, or it does not
    begin within `seconds`.
    """
    has_begun = threading.Event()
    has_ended = threading.Event()

    def live() -> None:
        try:
            has_begun.set()
            work()
        finally:
            has_ended.set()

    _thread.start_new_thread(live, ())
    if not has_begun.wait(seconds):
        raise RuntimeError(
            f"the new thread {name!r} has not begun within {seconds:g} s: there may be too little "
            "memory"
        )
    return has_ended


class ThreadWorker(Worker):
    """A worker with a thread of its own, which begins now and ends when this object is no longer
    referenced.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._has_ended = start_thread(_Server(self._work, name), name)
        weakref.finalize(self, self._work.put, None)

    def start(self, work: Callable[[], None]) -> Joinable:
        piece = _Piece(work, self._name, self._has_ended)
        self._work.put(piece)
        return piece


def started_executor() -> ThreadPoolExecutor:
    """Return an executor like asyncio's own. All its threads are created now, instead of on the
    event loop when needed.
    """
    number = min(32, (os.cpu_count() or 1) + 4)
    executor = ThreadPoolExecutor(number, "work of the event loop")
    are_there = threading.Barrier(number + 1)
    for _ in range(number):
        executor.submit(are_there.wait, START_SECONDS)
    are_there.wait(START_SECONDS)
    return executor


class ProcessExecutor:
    """One thread for tasks from all event loops of a process. After a fork, which copies no
    threads, it is created again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def make_thread(self) -> None:
        """Create the thread now, instead of on the event loop when it is needed."""
        self.executor.submit(int).result(START_SECONDS)

    def _begin_anew(self) -> None:
        self.executor = ThreadPoolExecutor(1, self._name)


PARSING = ProcessExecutor("parse messages")
"""Executor that parses large messages, one at a time, so that they take little memory and delay
the loop little."""


class _Piece:
    """One task of a worker."""

    def __init__(
        self, work: Callable[[], None], worker: str, worker_has_ended: threading.Event
    ) -> None:
        self._work = work
        self._worker = worker
        self._worker_has_ended = worker_has_ended
        self._is_done = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self._is_done.set()

    def join(self) -> None:
        """Block until the task is done. Raises RuntimeError if its thread has ended before."""
        # The waits are short, because a thread without memory may set the event and fail to wake
        # the waiting thread.
        while not self._is_done.wait(POLL_SECONDS):
            if self._worker_has_ended.is_set() and not self._is_done.is_set():
                raise RuntimeError(
                    f"the thread {self._worker!r} has ended before its work was done"
                )


class _Server:
    """The loop of a worker's thread. It holds no reference to the worker itself."""

    def __init__(self, work: queue.SimpleQueue["_Piece | None"], name: str) -> None:
        self._work = work
        self._name = name

    def __call__(self) -> None:
        threading.current_thread().name = self._name
        while (piece := self._work.get()) is not None:
            try:
                piece.run()
            except Exception:
                log.exception("a task that must not raise has raised an error")
            del piece  # No reference may remain while the thread waits for the next task.
