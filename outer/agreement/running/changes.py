"""Tells the driver of the round protocol that something has changed."""

import asyncio
from contextlib import suppress

from outer.agreement.knowledge import Knowledge

FEW_ISLANDS = 16
GATHER_SECONDS = 0.25e-3
"""For each island of a large run. To look at what has changed takes about a tenth of it for each island."""
VOTE_SECONDS = 0.05e-3
"""The same for votes, which all wait for. To look at them takes less."""


class Changes:
    """Changes since the last wait. All methods run on one event loop.

    To look whether a round can go on takes time in proportion to the number of islands, and so many messages arrive
    before it can. Among many islands what arrives within a short time is therefore looked at together.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._changed = asyncio.Event()
        self._next_look: asyncio.TimerHandle | None = None

    def add(self) -> None:
        """Something has changed that may let the round go on at once."""
        self._changed.set()

    def add_report(self, seconds: float = GATHER_SECONDS) -> None:
        """One of the other islands has reported, of which the round needs all. Among few islands it is like `add`.

        `seconds`: for each island, until this is looked at.
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
