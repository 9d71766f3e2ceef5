"""The event loop of a rank, in a thread of its own, so that peers are answered while inner steps compute."""

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

MAX_SELECT_SECONDS = 3600.0
"""The system takes no longer waits than some weeks."""


class LoopThread:
    """Runs coroutines for the training threads. Its clock, and so every wait on it, is `slowness` times slower."""

    def __init__(self, slowness: float = 1.0) -> None:
        self._slowness = slowness
        self._loop = asyncio.new_event_loop() if slowness == 1.0 else SlowLoop(slowness)
        self._thread = threading.Thread(target=self._loop.run_forever, name="outer-loop", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work`; its result is the future's."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """The result of `work`, waited for. None: `work` bounds its own waits. Raises TimeoutError."""
        future = self.start(work)
        try:
            return future.result(None if timeout_seconds is None else timeout_seconds * self._slowness)
        except BaseException:
            future.cancel()
            raise

    def try_to(self, work: Coroutine[Any, Any, object], timeout_seconds: float) -> bool:
        """Whether `work` was done in time; for what nobody depends on, as a goodbye. Its other errors are raised."""
        try:
            self.run(work, timeout_seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        self.start(_cancel_others()).result(5 * self._slowness)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()


class SlowLoop(asyncio.SelectorEventLoop):
    """An event loop on which `slowness` seconds pass as one."""

    def __init__(self, slowness: float) -> None:
        super().__init__(SlowSelector(slowness))
        self._slowness = slowness

    def time(self) -> float:
        return super().time() / self._slowness


class SlowSelector(selectors.DefaultSelector):
    """Waits `slowness` times as long as it is told."""

    def __init__(self, slowness: float) -> None:
        super().__init__()
        self._slowness = slowness

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else min(timeout * self._slowness, MAX_SELECT_SECONDS))


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=3) if tasks else None
