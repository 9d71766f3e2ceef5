"""Send the pages of a run its events as they happen. One reader of its records serves all open
pages.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from diloco.watch.view.overlay import list_others
from diloco.watch.view.prediction import RunPrediction

UPDATE_SECONDS = 0.5
MAX_STREAMS = 64
"""Most pages of a run that are kept up to date at the same time. One more page ends the stream of
the oldest."""
MAX_WAITING = 16
"""Most events that wait for a page. If a page does not read them its stream ends, and the page
connects again."""
END = ""
Reader = asyncio.Queue[str]


class Feed:
    """The events of one run. It reads records only while a page listens. All methods run on one
    event loop.
    """

    def __init__(self, prediction: RunPrediction, operator: str | None = None) -> None:
        """Create a feed. `operator`: the key in whose name the page may act; None if it may not
        act.
        """
        self._prediction = prediction
        self._view = prediction.view
        self._operator = operator
        self._readers: dict[Reader, None] = {}  # the oldest first
        self._position: Any = None
        self._predicted: dict[str, Any] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._beginning: asyncio.Lock | None = None

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events: first a snapshot of the run, then new rows every
        UPDATE_SECONDS, and the prediction.
        """
        await self._begin()
        reader = Reader(MAX_WAITING)
        position = self._position
        self._readers[reader] = None
        while len(self._readers) > MAX_STREAMS:
            self._end(next(iter(self._readers)))
        try:
            snapshot = await asyncio.to_thread(self._view.snapshot, position)
            others = await asyncio.to_thread(list_others, self._view.run_dir)
            yield encode_event(
                "snapshot", {"operator": self._operator, "others": others} | snapshot
            )
            if self._predicted is not None:
                yield encode_event("predicted", self._predicted)
            while (text := await reader.get()) != END:
                yield text
        finally:
            self._readers.pop(reader, None)

    async def _begin(self) -> None:
        """Start reading the records, unless that has begun already."""
        self._beginning = self._beginning or asyncio.Lock()
        async with self._beginning:
            if self._reading is None or self._reading.done():
                self._position = await asyncio.to_thread(self._view.read)
                self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        finding = asyncio.create_task(asyncio.to_thread(self._prediction.find))
        try:
            await asyncio.sleep(UPDATE_SECONDS)
            while self._readers:
                if finding.done():  # New rows do not wait for the prediction.
                    self._tell_prediction(finding.result())
                    finding = asyncio.create_task(asyncio.to_thread(self._prediction.find))
                self._tell_news(await asyncio.to_thread(self._view.read))
                await asyncio.sleep(UPDATE_SECONDS)
        finally:
            finding.cancel()
            for reader in list(self._readers):
                self._end(reader)

    def _tell_prediction(self, found: dict[str, Any]) -> None:
        if found != self._predicted:
            self._predicted = found
            self._tell(encode_event("predicted", found))

    def _tell_news(self, now: Any) -> None:
        new = self._view.between(self._position, now)
        self._position = now
        # With nothing new, a comment is sent, which shows whether the page has gone.
        self._tell(encode_event("more", new) if any(new.values()) else ": nothing new\n\n")

    def _tell(self, text: str) -> None:
        for reader in list(self._readers):
            if reader.full():
                self._end(reader)
            else:
                reader.put_nowait(text)

    def _end(self, reader: Reader) -> None:
        """End a stream after its page has read the waiting events."""
        self._readers.pop(reader, None)
        if reader.full():
            reader.get_nowait()
        reader.put_nowait(END)


def encode_event(name: str, values: dict[str, Any]) -> str:
    """Return a server-sent event with `values` as JSON."""
    return f"event: {name}\ndata: {json.dumps(values, allow_nan=False, separators=(',', ':'))}\n\n"
