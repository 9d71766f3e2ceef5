"""Notifies the driver of the round protocol of changes, and combines many changes of a large run
into one.
"""

import asyncio
from contextlib import suppress

from outer.agreement.knowledge import Knowledge

FEW_ISLANDS = 16
GATHER_SECONDS = 0.25e-3
"""In a large run, changes are collected for this time per island. Processing them takes about a
tenth of it per island."""
VOTE_SECONDS = 0.05e-3
"""The same for votes, which all islands wait for and which take less time to process."""


class Changes:
    """Changes since the last wait. All methods run on one event loop.

    To check whether a round can continue takes time in proportion to the number of islands, and as
    many messages arrive before it can. Among many islands, all changes of a short period are
    therefore checked together.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._changed = asyncio.Event()
        self._next_look: asyncio.TimerHandle | None = None

    def add(self) -> None:
        """Record a change after which the round may continue at once."""
        self._changed.set()

    def add_report(self, seconds: float = GATHER_SECONDS) -> None:
        """Record a report of one island, where the round needs reports of all. Among few islands
        this is the same as `add`.

        `seconds`: the time per island for which changes are collected before they are processed.
        """
        num_islands = len(self._knowledge.present)
        if num_islands <= FEW_ISLANDS:
            self.add()
        else:
            self._look_within(num_islands * seconds)

    def _look_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._next_look is not None and self._next_look.when() <= loop.time() + seconds:
            return
        if self._next_look is not None:
            self._next_look.cancel()
        self._next_look = loop.call_later(seconds, self._look)

    async def wait(self, seconds: float) -> None:
        """Return when something has changed since the last wait, or after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def _look(self) -> None:
        self._next_look = None
        self.add()
