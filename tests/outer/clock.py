"""A clock for tests on one event loop: when nobody has anything to do, the time of the next
deadline comes at once.

So a wait of ten minutes costs nothing, and a busy machine changes no result.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

GUARD_SECONDS = 120.0
"""Simulated; far below the ten minutes that are waited for islands of which nothing is known."""


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine on a simulated clock; a hang ends as a failure."""

    async def guarded() -> None:
        asyncio.get_running_loop().set_default_executor(InlineExecutor())
        async with asyncio.timeout(GUARD_SECONDS):
            await test()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(guarded())


def now() -> float:
    """Simulated seconds."""
    return asyncio.get_running_loop().time()


async def until(is_so: Callable[[], bool]) -> None:
    """Let simulated time pass until it is so."""
    while not is_so():  # noqa: ASYNC110 - an event would have to be put into what is tested
        await asyncio.sleep(0.01)


def stand_still(seconds: float) -> None:
    """As if nothing here had run for this time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    loop.stand_still(seconds)


class InlineExecutor(ThreadPoolExecutor):
    """Does the work at once: a thread's time would not be in the simulated clock."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - handed to the waiting task
            future.set_exception(error)
        return future


class SimulatedSelector(selectors.DefaultSelector):
    """Waits for nothing: when nothing has happened, it is later."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if not events and timeout is not None:
            self.seconds += max(timeout, 0.0)
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on the clock of its selector."""

    def __init__(self) -> None:
        self._simulated = SimulatedSelector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.seconds

    def stand_still(self, seconds: float) -> None:
        self._simulated.seconds += seconds
