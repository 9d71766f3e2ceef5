"""Threads that are waited for with a limit, and a thread that is made once and then does one work after another.

`Thread.start` waits without limit until the new thread says that it runs. One that dies of a lack of memory before
that never says so (CPython's gh-140746), so an island that made a thread for each round stood still for ever after a
moment without memory. A worker's thread is made at the start of the process, when there is memory.
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
"""How long a new thread may take to begin. On a machine with other work it takes milliseconds."""
POLL_SECONDS = 1.0


class Joinable(Protocol):
    """Work in another thread that has been started."""

    def join(self) -> None:
        """Block until it has ended."""


class Worker(Protocol):
    """A thread that does one work after another, in the order of the calls."""

    def start(self, work: Callable[[], None]) -> Joinable:
        """Do `work`, which raises nothing, once the work before it is done. No process waits for it at its end."""
        ...


def start_thread(work: Callable[[], None], name: str, seconds: float = START_SECONDS) -> threading.Event:
    """Run `work` in a new daemon thread. The result is set when the thread has ended, however that came.

    Raises RuntimeError, which names it, if there can be no new thread now, or it does not begin within `seconds`.
    """
    has_begun, has_ended = threading.Event(), threading.Event()

    def live() -> None:
        try:
            has_begun.set()
            work()
        finally:
            has_ended.set()

    _thread.start_new_thread(live, ())
    if not has_begun.wait(seconds):
        raise RuntimeError(f"the new thread {name!r} has not begun within {seconds:g} s: is there too little memory?")
    return has_ended


class ThreadWorker(Worker):
    """The thread begins now and ends when nobody holds this object any more."""

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
    """An executor like asyncio's own, all of whose threads are made now instead of on the event loop when needed."""
    number = min(32, (os.cpu_count() or 1) + 4)
    executor, are_there = ThreadPoolExecutor(number, "work of the event loop"), threading.Barrier(number + 1)
    for _ in range(number):
        executor.submit(are_there.wait, START_SECONDS)
    are_there.wait(START_SECONDS)
    return executor


class ProcessExecutor:
    """One thread for work that all event loops of a process hand over. A fork has no threads, so it begins anew."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def make_thread(self) -> None:
        """Make the thread now instead of on the event loop when it is needed."""
        self.executor.submit(int).result(START_SECONDS)

    def _begin_anew(self) -> None:
        self.executor = ThreadPoolExecutor(1, self._name)


PARSING = ProcessExecutor("parse messages")
"""Large messages are parsed in it, one at a time, so that they take little memory and the loop waits for one only."""


class _Piece:
    """One piece of a worker's work."""

    def __init__(self, work: Callable[[], None], worker: str, worker_has_ended: threading.Event) -> None:
        self._work, self._worker, self._worker_has_ended = work, worker, worker_has_ended
        self._is_done = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self._is_done.set()

    def join(self) -> None:
        """Block until it is done. Raises RuntimeError if its thread has ended before."""
        # In short waits: a thread without memory may set the event and fail to wake who waits for it.
        while not self._is_done.wait(POLL_SECONDS):
            if self._worker_has_ended.is_set() and not self._is_done.is_set():
                raise RuntimeError(f"the thread {self._worker!r} has ended before its work was done")


class _Server:
    """What a worker's thread does. It does not hold the worker itself."""

    def __init__(self, work: queue.SimpleQueue["_Piece | None"], name: str) -> None:
        self._work, self._name = work, name

    def __call__(self) -> None:
        threading.current_thread().name = self._name
        while (piece := self._work.get()) is not None:
            try:
                piece.run()
            except Exception:
                log.exception("a work that should raise nothing has raised")
            del piece  # Nothing of it may live on while the thread waits for the next.
