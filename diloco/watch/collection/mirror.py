"""A copy of an island's records on this machine, written as the island sends them. Data from the
peer is checked here.

    FOLDER/ISLAND/metrics.jsonl  told.json  presence.jsonl  environment.json
"""

import json
import time
from contextlib import suppress
from pathlib import Path

from diloco.records.environment import FILE as ENVIRONMENT
from diloco.records.growing_file import ends_inside_a_line
from diloco.records.metrics import to_line
from diloco.records.run_folder import METRICS, PRESENCE
from diloco.status.record_pages import RecordsPage, RecordsRequest
from diloco.status.reply import IslandStatus
from diloco.watch.collection.record_check import check_record
from inner.files import make_folder, write_atomically
from outer.errors import MessageError
from outer.network.messages import parse

TOLD = "told.json"
"""Name of the file that records how much of an island's records has been copied."""
MAX_ISLAND_BYTES = 1 << 30
"""Most bytes of records that are kept per island."""


class RecordsMirror:
    """The records of one island in a folder with its name."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder, "--keep")
        (folder / METRICS).touch()
        self.folder = folder
        self.request = read_request(folder / TOLD)
        """The next request to the island."""
        self.num_dropped = 0
        """Number of lines that were no valid records."""
        self._last_presence: tuple[bool, str] | None = None
        # A watcher that was killed may have left an incomplete last line.
        for name in (METRICS, PRESENCE):
            end_line(folder / name)

    @property
    def is_full(self) -> bool:
        """Whether the island has sent more records than an honest island would write."""
        return (self.folder / METRICS).exists() and (
            self.folder / METRICS
        ).stat().st_size >= MAX_ISLAND_BYTES

    def add(self, page: RecordsPage) -> None:
        """Append the records of a page, which answers `request`. Raises OSError if the disk is
        full.
        """
        if not page.journal:
            return
        lines = page.lines.split("\n")[:-1]
        now = time.time()
        records = [record for line in lines if (record := check_record(line, now)) is not None]
        self.num_dropped += len(lines) - len(records)
        if records:
            with (self.folder / METRICS).open("a", encoding="ascii") as file:
                file.write("".join(map(to_line, records)))
        self.request = RecordsRequest(journal=page.journal, offset=page.end)
        write_atomically(self.folder / TOLD, self.request.model_dump_json())

    def note_presence(self, *, answers: bool, text: str) -> None:
        """Write to presence.jsonl whether the island answers, and if not why, unless the last line
        says the same.
        """
        if (answers, text) != self._last_presence:
            self._last_presence = answers, text
            with (self.folder / PRESENCE).open("a") as file:
                file.write(
                    json.dumps({"time": time.time(), "answers": answers, "text": text}) + "\n"
                )

    def note_machine(self, status: IslandStatus) -> None:
        """Write the island's hardware and versions to environment.json, in the form of the island's
        own file.
        """
        versions = ", ".join(f"{name} {version}" for name, version in status.versions.items())
        values = {"processor": f"{status.hardware} on {status.host}, {versions}"}
        write_atomically(self.folder / ENVIRONMENT, json.dumps(values) + "\n")


def read_request(path: Path) -> RecordsRequest:
    """Return the request that an earlier watcher would have sent next; the first request if there
    was none.
    """
    with suppress(OSError, MessageError):
        return parse(RecordsRequest, path.read_bytes())
    return RecordsRequest(journal="", offset=0)


def end_line(path: Path) -> None:
    """Add a line break to a file whose last line has none."""
    if path.exists() and ends_inside_a_line(path):
        with path.open("ab") as file:
            file.write(b"\n")
