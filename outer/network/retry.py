"""Repeated attempts with pauses, until one succeeds or the time is over, and pauses that grow."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from outer.errors import UnreachableError
from outer.network.event_loop import loop_time

log = logging.getLogger(__name__)

RETURN_SECONDS = 600.0
"""How long an island that has been in the run retries the swarm's addresses: a bootstrap process
may be down."""
T = TypeVar("T")
MAX_DOUBLINGS = 64
"""Most times that the pause doubles; many more would overflow a float."""


class Clock(Protocol):
    """The clock on which a thread waits. An `EventLoop` (event_loop.py) is one."""

    def time(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


async def retry(attempt: Callable[[], Awaitable[T]], *, seconds: float, pause_seconds: float) -> T:
    """Call `attempt` until its result is true or `seconds` have passed, and return its last result.

    The first attempt is always made. An attempt that begins in time is not cut short: it bounds its
    own waits.

    >>> replies = iter([None, None, "ready"])
    >>> async def ask() -> str | None:
    ...     return next(replies)
    >>> asyncio.run(retry(ask, seconds=10, pause_seconds=0))
    'ready'
    """
    deadline = loop_time() + seconds
    while True:
        result = await attempt()
        if result or loop_time() >= deadline:
            return result
        await asyncio.sleep(pause_seconds)


class WallClock:
    """The machine's own clock."""

    def time(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


WALL_CLOCK = WallClock()


async def retry_unreachable(attempt: Callable[[], Awaitable[T]], is_known: bool) -> T:
    """Open a network. Retry for RETURN_SECONDS if this island `is_known` in the run but no address
    answers.

    A new island does not retry, because its addresses may be wrong. Raises UnreachableError and
    what `attempt` raises.
    """
    deadline = time.monotonic() + (RETURN_SECONDS if is_known else 0.0)
    while True:
        try:
            return await attempt()
        except UnreachableError as error:
            if time.monotonic() >= deadline:
                raise
            left = (deadline - time.monotonic()) / 60
            log.warning(
                "%s. This island has been in the run before, so it retries for %.0f more minutes",
                error,
                left,
            )


def retry_blocking(
    attempt: Callable[[], T], clock: Clock = WALL_CLOCK, *, seconds: float, pause_seconds: float
) -> T:
    """Do the same as `retry` in a thread; its waits are on `clock`."""
    deadline = clock.time() + seconds
    while not (result := attempt()) and clock.time() < deadline:
        clock.sleep(pause_seconds)
    return result


def backoff(num_failures: int, *, first_seconds: float, max_seconds: float) -> float:
    """Return the pause after `num_failures` (at least 1) in a row. It doubles with each, up to
    `max_seconds`.

    >>> [backoff(n, first_seconds=1.0, max_seconds=10.0) for n in (1, 2, 3, 4, 5, 9999)]
    [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    """
    doublings = min(num_failures - 1, MAX_DOUBLINGS)
    return min(first_seconds * 2.0**doublings, max_seconds)
