"""One event loop for all that is fuzzed, because making one for each input takes longer than the
rest.
"""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

LOOP = asyncio.new_event_loop()
_executors: list[ThreadPoolExecutor] = []
"""The one whose threads the loop uses now, once it has used some."""


def end_threads() -> None:
    """End the threads that the loop has used. Other tests of the process fork, which needs that
    there are none.
    """
    while _executors:
        _executors.pop().shutdown()
    _executors.append(ThreadPoolExecutor(thread_name_prefix="fuzz"))
    LOOP.set_default_executor(_executors[0])


end_threads()
WAIT_SECONDS = 0.005
"""What then still waits, waits for somebody else."""
T = TypeVar("T")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def finish_or_leave(work: Coroutine[Any, Any, T]) -> T | None:
    """The result of a coroutine, or None if it waits for somebody else."""

    async def main() -> T | None:
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=WAIT_SECONDS)
        if done:
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return None

    return LOOP.run_until_complete(main())
