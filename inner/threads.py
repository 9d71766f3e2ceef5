"""Start threads with a limit on the time to wait, and keep a thread that runs one piece of work
after another.

`Thread.start` waits without a limit until the new thread reports that it runs. A thread that dies
of a lack of memory before that never reports it (CPython's gh-140746), and the thread that started
it waits forever.
"""

import _thread
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

START_SECONDS = 10.0
"""Number of seconds within which a new thread must begin. Even on a busy machine it takes only
milliseconds."""

T = TypeVar("T")


def start_thread(
    work: Callable[[], object], name: str, seconds: float = START_SECONDS
) -> threading.Event:
    """Run `work` in a new daemon thread, which `threading` does not list. Return an event that is
    set when it has ended.

    Raises RuntimeError, which contains `name`, if no new thread can be started now, or it does not
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

    try:
        _thread.start_new_thread(live, ())
    except (RuntimeError, MemoryError) as error:
        raise RuntimeError(f"the thread {name!r} could not be started: {error!r}") from error
    if not has_begun.wait(seconds):
        raise RuntimeError(
            f"the new thread {name!r} has not begun within {seconds:g} s: there may be too little "
            "memory"
        )
    return has_ended


class Worker:
    """A daemon thread that starts at once, while there is memory, and runs one piece of work after
    another until `close`.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], Future] | None] = (
            queue.SimpleQueue()
        )
        self.has_ended = start_thread(self._serve, name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` after all work that was submitted before. The future gets its result or
        exception.
        """
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
            del piece, work, future  # Free their memory while the thread waits for the next work.
