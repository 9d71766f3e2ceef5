"""The records of an island for watchers, page by page, and the server that reads them.

    call             body             reply
    island_records   RecordsRequest   RecordsPage, deflated

The server runs on rank 0. A page holds whole lines of the island's metrics.jsonl from a byte of the
file on. So a watcher goes on where it was after a restart of either side, and the island keeps
nothing in memory for it. Whoever may request the island's status may request its records.
"""

import asyncio
import hashlib
import time
from pathlib import Path

from pydantic import Field

from outer.network.endpoints import Endpoint, Messenger
from outer.network.event_loop import EventLoop
from outer.network.messages import Message, deflate, receive

CALL = "island_records"
PAGE_BYTES = 1 << 18
MAX_OFFSET = 1 << 50
HEAD_BYTES = 1 << 12
RECENT_SECONDS = 3.0
"""A watcher that has asked within this time may still want the last records."""
LINGER_SECONDS = 2.0
"""Longest time that an ending island waits for such a watcher."""
POLL_SECONDS = 0.05


class RecordsRequest(Message):
    """Body of the call. A watcher without records of the island sends an empty journal."""

    journal: str = Field(max_length=16, pattern=r"^[0-9a-f]*$")
    """The journal of the last page."""
    offset: int = Field(ge=0, lt=MAX_OFFSET)
    """Where the last page ended."""


class RecordsPage(Message):
    """The reply. It comes from a peer, so it is validated strictly; its lines are checked one by
    one later.
    """

    journal: str = Field(max_length=16, pattern=r"^[0-9a-f]*$")
    """Identifies the file: an island that restarts in an empty folder has another one.

    Empty without records.
    """
    end: int = Field(ge=0, lt=MAX_OFFSET)
    """The byte of the file where the lines end."""
    size: int = Field(ge=0, lt=MAX_OFFSET)
    """Bytes in the file; if they exceed `end`, another page can be requested at once."""
    lines: str = Field(max_length=PAGE_BYTES)


class RecordsServer:
    """Answers on rank 0 from the file of the island's records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal = ""
        self._asked_at = float("-inf")
        self._told = 0
        self._reading = asyncio.Semaphore(1)

    def serve(self, messenger: Messenger) -> None:
        """Answer the calls of watchers from now on."""
        messenger.serve(CALL, self._on_request)

    async def _on_request(self, source: Endpoint, body: bytes) -> bytes:
        request = await receive(RecordsRequest, body)
        # One request at a time, so that many watchers occupy a single thread of the island.
        async with self._reading:
            page = await asyncio.to_thread(self.read_page, request)
        self._asked_at = time.monotonic()
        self._told = page.end
        return deflate(page.encode())

    def read_page(self, request: RecordsRequest) -> RecordsPage:
        """Return the lines after the request's offset; all lines if the watcher knows another
        file.
        """
        try:
            with self._path.open("rb") as file:
                self._journal = self._journal or name_journal(file.read(HEAD_BYTES))
                size = file.seek(0, 2)
                is_known = request.journal == self._journal and request.offset <= size
                begin = request.offset if is_known else 0
                file.seek(begin)
                data = file.read(PAGE_BYTES)
        except OSError:  # The file cannot be read now; the watcher asks again.
            return RecordsPage(journal="", end=0, size=0, lines="")
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == PAGE_BYTES:
            # No record is so long: the damaged line is sent in pieces, and the watcher drops it.
            whole = PAGE_BYTES
        return RecordsPage(
            journal=self._journal,
            end=begin + whole,
            size=max(size, begin + whole),
            lines=data[:whole].decode("ascii", "replace"),
        )

    def linger(self, event_loop: EventLoop) -> None:
        """At the island's end, wait until a recent watcher has the last records.

        The wait takes LINGER_SECONDS at most.
        """
        if time.monotonic() - self._asked_at > RECENT_SECONDS:
            return
        deadline = time.monotonic() + LINGER_SECONDS
        try:
            size = self._path.stat().st_size
        except OSError:  # There are no records.
            return
        while self._told < size and time.monotonic() < deadline:
            event_loop.sleep(POLL_SECONDS)


def name_journal(head: bytes) -> str:
    """Return a name of the file that begins with these bytes: a hash of its first line.

    The name is empty until that line is complete.
    """
    line = head.partition(b"\n")
    return hashlib.sha256(line[0]).hexdigest()[:16] if line[1] or len(head) == HEAD_BYTES else ""
