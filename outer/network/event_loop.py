"""The event loop of a rank: its thread, its clock, a signal for its tasks, and a check for
freezes of the process.
"""

import asyncio
import logging
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from outer.threads import PARSING, ThreadWorker, Worker, start_thread, started_executor

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_SELECT_SECONDS = 3600.0  # the operating system rejects waits of more than some weeks
BEAT_SECONDS = 0.25
CHECKS_THREADS = bool(os.environ.get("DILOCO_CHECK_THREADS"))
"""Whether `assert_on_loop` checks anything."""
FROZEN_SECONDS = 2.0
"""A gap of this length counts as a freeze. It is shorter than the time after which other islands
find this one lost."""


class EventLoop(Protocol):
    """Interface of an event loop for the threads of a rank, with the clock on which they measure
    and wait.
    """

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop, and return a future of its result."""
        ...

    def wait_for(self, started: Future[T]) -> T:
        """Block until the work that `start` has returned is done, and return its result."""
        ...

    def run(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run `work` on the loop, block until it is done, and return its result. Raises
        TimeoutError.
        """
        ...

    def call(self, work: Callable[[], T]) -> T:
        """Call a function on the loop, which owns what it touches, and block until its result is
        there.
        """
        return self.run(_call(work))

    def try_to(self, work: Coroutine[Any, Any, object], timeout_seconds: float) -> bool:
        """Run `work` that no other work depends on, such as a goodbye. Return whether it
        finished in time.
        """
        try:
            self.run(work, timeout_seconds)
        except TimeoutError:
            return False
        return True

    def time(self) -> float:
        """Return the seconds on the loop's clock."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread until `seconds` have passed on the loop's clock."""

    def worker(self, name: str) -> Worker:
        """Create a separate thread, at once, for work that waits for this loop, with any threads
        that the loop needs.
        """
        ...


class EventLoopThread(EventLoop):
    """Runs an event loop in a thread of its own, so that peers are answered while the training
    threads compute.
    """

    def __init__(self, slowness: float = 1.0) -> None:
        self._slowness = slowness
        self._loop = asyncio.new_event_loop() if slowness == 1.0 else SlowLoop(slowness)
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_executor = False
        self._thread = threading.Thread(target=self._live, name="outer-loop", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop. Raises RuntimeError once the loop is closed, because the
        work would never run.
        """
        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError("the event loop is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait_for(self, started: Future[T]) -> T:
        return started.result()

    def run(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        future = self.start(work)
        try:
            return future.result(
                None if timeout_seconds is None else timeout_seconds * self._slowness
            )
        except BaseException:
            future.cancel()
            raise

    def time(self) -> float:
        return self._loop.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds * self._slowness)

    def worker(self, name: str) -> Worker:
        with self._lock:
            if not self._has_executor:
                self._has_executor = True
                self._loop.set_default_executor(started_executor())
                PARSING.make_thread()
        return ThreadWorker(name)

    def close(self) -> None:
        """Cancel all running tasks and end the thread."""
        self.start(_cancel_others()).result(5 * self._slowness)
        with self._lock:
            self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    def _live(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException as error:  # noqa: BLE001 - whatever it was, nothing answers peers or ends rounds any more
            # Exceptions of callbacks do not get here: the loop itself has failed, for example for
            # lack of memory.
            with suppress(MemoryError):
                log.critical("the event loop has failed (%r); this process ends", error)
            os._exit(1)
        # Other threads may have started work while the loop was being closed, and would wait for it
        # for ever.
        self._loop.run_until_complete(_cancel_others())


class SlowLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock, and so every wait on it, runs `slowness` times slower.

    `diloco simulate --in-process` uses it because its islands take turns and each gets a share of
    the time.
    """

    def __init__(self, slowness: float) -> None:
        super().__init__(SlowSelector(slowness))
        self._slowness = slowness

    def time(self) -> float:
        return super().time() / self._slowness


class SlowSelector(selectors.DefaultSelector):
    def __init__(self, slowness: float) -> None:
        super().__init__()
        self._slowness = slowness

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(
            None if timeout is None else min(timeout * self._slowness, MAX_SELECT_SECONDS)
        )


def assert_on_loop() -> None:
    """Raise AssertionError if the caller does not run on an event loop, whose tasks alone may touch
    a state.

    It does so where DILOCO_CHECK_THREADS is set, as in tests: no run ends because of a race that
    may be harmless.
    """
    if CHECKS_THREADS:
        assert asyncio._get_running_loop() is not None, (
            "this state belongs to the event loop: use EventLoop.call"
        )


async def _call(work: Callable[[], T]) -> T:
    return work()


def loop_time() -> float:
    """Return the seconds on the running event loop's clock. Must be called on the loop."""
    return asyncio.get_running_loop().time()


class ChangeSignal:
    """Wakes the tasks of one event loop that wait for a condition, each time the condition may
    have changed.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until(
        self, condition: Callable[[], bool], timeout_seconds: float | None = None
    ) -> bool:
        """Wait until `condition` is true, and return whether it became true in time. Raises what
        `condition` raises.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class Tasks:
    """Keeps references to tasks until they end or are cancelled, because the event loop itself
    holds them only weakly.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancel all tasks. They end when the event loop next runs them."""
        for task in self._running:
            task.cancel()

    async def end(self) -> None:
        """Cancel all tasks, and wait until they have ended. Idempotent."""
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


class FreezeDetector:
    """Detects that this process stood still: it was stopped, swapped out, or ran on a laptop that
    was closed.

    Call `was_frozen` on the event loop at least every BEAT_SECONDS, and before anything that must
    not follow a freeze.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None  # The loop's clock cannot be read before the loop runs.

    def was_frozen(self) -> bool:
        """Return whether the process has stood still since the last call."""
        now = loop_time()
        seconds = 0.0 if self._asked_at is None else now - self._asked_at
        self._asked_at = now
        if seconds > FROZEN_SECONDS:
            log.warning("this process stood still for %.1f s", seconds)
        return seconds > FROZEN_SECONDS


class WaitingThreads:
    """An unlimited pool of daemon threads for blocking calls, reused because starting a thread
    would delay the event loop.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0
        self._is_closed = False

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, in an idle thread or a new one."""
        with self._lock:
            has_idle = self._num_idle > 0
            self._num_idle -= has_idle
        if has_idle:
            self._work.put(work)
        else:
            _new_thread(partial(self._serve, work))

    def close(self) -> None:
        """End the idle threads now, and the busy ones when their work is done."""
        with self._lock:
            self._is_closed = True
            num_idle = self._num_idle
            self._num_idle = 0
        for _ in range(num_idle):
            self._work.put(None)

    def _serve(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            with self._lock:
                if self._is_closed:
                    return
                self._num_idle += 1
            work = self._work.get()


def _new_thread(work: Callable[[], None]) -> None:
    start_thread(work, "blocking call")


async def in_thread(
    work: Callable[[], T], start: Callable[[Callable[[], None]], None] = _new_thread
) -> T:
    """Run a blocking call in a daemon thread and return its result. After a cancellation the thread
    continues.
    """
    future: Future[T] = Future()
    # from here on it cannot be cancelled, so the thread can always settle it
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - handed to the waiting task
            future.set_exception(error)

    start(run)
    return await asyncio.wrap_future(future)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=3) if tasks else None
