"""The event loop of a rank, in a thread of its own, so that peers are answered while inner steps compute."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for the training thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outer-loop", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work`; its result is the future's."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """The result of `work`, waited for. None: `work` bounds its own waits. Raises TimeoutError."""
        future = self.start(work)
        try:
            return future.result(timeout_seconds)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        self.start(_cancel_others()).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=3) if tasks else None
