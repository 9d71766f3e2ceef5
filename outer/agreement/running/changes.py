"""Tells the driver of the round protocol that something has changed."""

import asyncio
from contextlib import suppress

from outer.agreement.knowledge import Knowledge

FEW_ISLANDS = 16
GATHER_SECONDS = 0.25e-3
"""For each island of a large run. To look at what has changed takes about a tenth of it for each island."""


class Changes:
    """Changes since the last wait. All methods run on one event loop.

    To look whether a round can go on takes time in proportion to the number of islands, and so many messages arrive
    before it can. Among many islands what arrives within a short time is therefore looked at together.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._changed = asyncio.Event()
        self._is_gathering = False

    def add(self) -> None:
        """Something has changed that may let the round go on at once."""
        self._changed.set()

    def add_report(self) -> None:
        """One of the other islands has reported, of which the round needs all. Among few islands it is like `add`."""
        num_islands = len(self._knowledge.present)
        if num_islands <= FEW_ISLANDS:
            self.add()
        elif not self._is_gathering:
            self._is_gathering = True
            asyncio.get_running_loop().call_later(num_islands * GATHER_SECONDS, self._end_gathering)

    async def wait(self, seconds: float) -> None:
        """Return when something has changed since the last wait, or after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def _end_gathering(self) -> None:
        self._is_gathering = False
        self.add()
