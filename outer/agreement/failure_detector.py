"""Whether this process has stood still: stopped, swapped out, or on a laptop that was closed."""

import asyncio
import logging

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
FROZEN_SECONDS = 2.0
"""Nothing has run for so long: frozen. Less than the least time after which others call an island lost."""


class Pulse:
    """Ask it on the event loop, at least every BEAT_SECONDS and before anything that must not follow a freeze."""

    def __init__(self) -> None:
        self._asked_at: float | None = None  # Built before the loop runs.

    def has_missed(self) -> bool:
        """Whether the process has stood still since this was asked last."""
        now = asyncio.get_running_loop().time()
        seconds = 0.0 if self._asked_at is None else now - self._asked_at
        self._asked_at = now
        if seconds > FROZEN_SECONDS:
            log.warning("this process stood still for %.1f s", seconds)
        return seconds > FROZEN_SECONDS
