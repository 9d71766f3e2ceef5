"""Threads that are waited for with a limit, and one that is made once and then does one work after another.

`Thread.start` waits without limit until the new thread says that it runs. One that dies of a lack of memory before
that never says so (CPython's gh-140746), and whoever has started it stands still for ever.
"""

import _thread
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

START_SECONDS = 10.0
"""How long a new thread may take to begin. On a machine with other work it takes milliseconds."""

T = TypeVar("T")


def start_thread(work: Callable[[], object], name: str, seconds: float = START_SECONDS) -> threading.Event:
    """Run `work` in a new daemon thread, which `threading` does not list. The result is set when it has ended.

    Raises RuntimeError, which names it, if there can be no new thread now, or it does not begin within `seconds`.
    """
    has_begun = threading.Event()
    has_ended = threading.Event()

    def live() -> None:
        try:
            has_begun.set()
            work()
        finally:
            has_ended.set()

    try:
        _thread.start_new_thread(live, ())
    except (RuntimeError, MemoryError) as error:
        raise RuntimeError(f"there can be no new thread {name!r} now: {error!r}") from error
    if not has_begun.wait(seconds):
        raise RuntimeError(f"the new thread {name!r} has not begun within {seconds:g} s: is there too little memory?")
    return has_ended


class Worker:
    """A daemon thread that begins now, when there is memory, and does one work after another until `close`."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], Future] | None] = queue.SimpleQueue()
        self.has_ended = start_thread(self._serve, name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` once the work before it is done. The future has its result or what it raised."""
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def close(self) -> None:
        """Let the thread end after the work that was submitted. Does not wait for it."""
        self._work.put(None)

    def _serve(self) -> None:
        while (piece := self._work.get()) is not None:
            work, future = piece
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)
            del piece, work, future  # Nothing of it may live on while the thread waits for the next.
