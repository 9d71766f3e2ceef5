"""Repeat an attempt with a pause in between, until it succeeds or its time is over."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def retry(attempt: Callable[[], Awaitable[T]], *, seconds: float, pause_seconds: float) -> T:
    """Call `attempt` until its result is true or `seconds` have passed, and return its last result.

    The first attempt is always made. An attempt that begins in time is not cut short: it bounds its own waits.

    >>> replies = iter([None, None, "ready"])
    >>> async def ask() -> str | None:
    ...     return next(replies)
    >>> asyncio.run(retry(ask, seconds=10, pause_seconds=0))
    'ready'
    """
    now = asyncio.get_running_loop().time
    deadline = now() + seconds
    while True:
        result = await attempt()
        if result or now() >= deadline:
            return result
        await asyncio.sleep(pause_seconds)


def retry_blocking(attempt: Callable[[], T], *, seconds: float, pause_seconds: float) -> T:
    """Like `retry`, for a thread without an event loop."""
    deadline = time.monotonic() + seconds
    while not (result := attempt()) and time.monotonic() < deadline:
        time.sleep(pause_seconds)
    return result
