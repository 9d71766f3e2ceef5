"""An event loop and threads on virtual time, with which an island runs the same code as on a real
machine.

One thread or event loop runs at a time. The world calls a machine's event loop or resumes one of
its threads, and continues when the loop has nothing more to do at this time, or the thread waits.
The order of all work therefore depends on virtual time alone.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from functools import partial
from math import inf
from typing import Any, TypeVar

from diloco.virtual.world import TICK_SECONDS, Machine
from outer.network.event_loop import EventLoop

T = TypeVar("T")
_CURRENT = threading.local()
"""Holds the virtual thread that belongs to a thread of the operating system."""


class VirtualEventLoop(EventLoop):
    """An event loop on a machine's virtual time. Only the machine's threads may call it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._loop = _Loop(machine)
        self._threads: list[VirtualThread] = []

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait_for(self, started: Future[T]) -> T:
        thread = _current()
        started.add_done_callback(lambda done: thread.resume_at(self.time()))
        thread.wait()
        return started.result()

    def run(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        return self.wait_for(
            self.start(work if timeout_seconds is None else asyncio.wait_for(work, timeout_seconds))
        )

    def time(self) -> float:
        return self._machine.world.now

    def sleep(self, seconds: float) -> None:
        thread = _current()
        thread.resume_at(self.time() + seconds)
        thread.wait()

    def worker(self, name: str) -> "VirtualWorker":
        return VirtualWorker(self, name)

    def spawn(self, work: Callable[[], None], name: str) -> "VirtualThread":
        """Run `work` in a new virtual thread."""
        self._threads = [thread for thread in self._threads if not thread.is_over]
        self._threads.append(VirtualThread(self._machine, work, name))
        return self._threads[-1]

    def close(self) -> None:
        """End all threads and tasks, wherever they wait. Must be called while the world does not
        run.
        """
        for thread in self._threads:
            thread.give_up()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_forever()  # Returns when the loop is idle.
        self._loop.close()


class VirtualWorker:
    """Implements `outer.threads.Worker`. Virtual threads cost no virtual time, so each piece of
    work gets a new thread.
    """

    def __init__(self, loop: VirtualEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name

    def start(self, work: Callable[[], None]) -> "VirtualThread":
        return self._loop.spawn(work, self._name)


class VirtualThread:
    """A thread that starts immediately in virtual time. Once it is resumed, the world pauses until
    it waits or ends.
    """

    def __init__(self, machine: Machine, work: Callable[[], None], name: str) -> None:
        self._machine = machine
        self._work = work
        self.is_over = False
        self._is_given_up = False
        self._joining: list[VirtualThread] = []
        self._since = 0.0
        """This thread's processor time when it was last resumed."""
        self._turn = threading.Lock()
        self._pause = threading.Lock()
        self._turn.acquire()
        self._pause.acquire()
        # A daemon thread, so that the process can end without a thread that was never given up.
        threading.Thread(target=self._live, name=name, daemon=True).start()
        self.resume_at(machine.world.now)

    def resume_at(self, when: float) -> None:
        """Resume the thread at this virtual time. Each `wait` needs exactly one call."""
        self._machine.at(when, self._resume)

    def wait(self) -> None:
        """Let the world continue until this thread is resumed. Must be called on this thread."""
        if not self._is_given_up:
            self._count()
            self._pause.release()
            self._turn.acquire()
            self._since = time.thread_time()
        if self._is_given_up:
            raise _GivenUp

    def give_up(self) -> None:
        """End the thread where it waits. Must be called while the world does not run."""
        if not self.is_over:
            self._is_given_up = True
            self._resume()

    def join(self) -> None:
        """Wait until this thread has ended. Must be called on another thread of the machine."""
        if not self.is_over:
            self._joining.append(_current())
            _current().wait()

    def _resume(self) -> None:
        self._turn.release()
        self._pause.acquire()

    def _count(self) -> None:
        """Charge the machine for this thread's processor time since it was resumed."""
        self._machine.cpu_seconds += time.thread_time() - self._since

    def _live(self) -> None:
        self._turn.acquire()
        self._since = time.thread_time()
        _CURRENT.thread = self
        try:
            if not self._is_given_up:
                self._work()
        except _GivenUp:
            pass
        finally:
            self._count()
            self.is_over = True
            for thread in self._joining:
                thread.resume_at(self._machine.world.now)
            self._pause.release()


class _GivenUp(BaseException):
    """Raised in a thread of a machine that is no longer simulated, to end the thread."""


class _Loop(asyncio.SelectorEventLoop):
    """Runs until it has nothing more to do at this time, and then asks its machine to run it at its
    next deadline.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._wakes_at = inf
        self._asked_for: set[float] = set()
        """Times at which the machine will run this loop, provided that the loop is due then."""
        self._is_active = False
        self._idle_seconds = inf
        super().__init__(_IdleSelector(self._on_select))

    def time(self) -> float:
        return self._machine.world.now

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if not self._is_active:
            self._wake_at(self.time())
        return handle

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do the work immediately, because the time of a real thread would not be in the simulated
        clock.
        """
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - passed to the waiting task
            done.set_exception(error)
        return done

    def _write_to_self(self) -> None:
        """Do nothing. A real loop would wake its selector here, but this selector never waits."""

    def _wake_at(self, when: float) -> None:
        if when < self._wakes_at:
            self._wakes_at = when
            if when not in self._asked_for:
                self._asked_for.add(when)
                self._machine.at(when, partial(self._run_if_due, when))

    def _run_if_due(self, when: float) -> None:
        self._asked_for.discard(when)
        if when != self._wakes_at:
            return  # An earlier run has replaced this time by another one.
        self._wakes_at = inf
        self._is_active = True
        self.run_forever()
        self._is_active = False
        self._wake_at(self.time() + self._idle_seconds)

    def _on_select(self, seconds: float) -> None:
        if seconds == 0:
            self._machine.world.now += TICK_SECONDS
            return
        self._idle_seconds = seconds
        self.stop()


class _IdleSelector(selectors.SelectSelector):
    """A selector that never waits. `on_select` gets the seconds for which the loop would wait;
    infinite without limit.
    """

    def __init__(self, on_select: Callable[[float], None]) -> None:
        super().__init__()
        self._on_select = on_select

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._on_select(inf if timeout is None else timeout)
        return []


def _current() -> VirtualThread:
    return _CURRENT.thread
