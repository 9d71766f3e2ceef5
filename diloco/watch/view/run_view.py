"""Read a run's folder repeatedly: its islands, faults, logbook and facts."""

import json
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.network_emulation.links import AccessLink
from diloco.records.faults import LOG
from diloco.records.logbook import LOGBOOK
from diloco.records.run_folder import BASELINE, find_island_folders, island_folders
from diloco.watch.view.facts import describe_machine, describe_run
from diloco.watch.view.history import (
    MAX_POINTS,
    MAX_ROWS,
    MAX_TEXT,
    MAX_TIME,
    Groups,
    IslandHistory,
    LinesTail,
    Row,
    Rows,
)

ENTRY = re.compile(r"- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z \*\*(.{1,64}?)\*\* (.*)")


@dataclass
class Position:
    """How much of a run has been sent to a page, as numbers of rows."""

    islands: dict[str, dict[str, int]] = field(default_factory=dict)
    baseline: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    faults: int = 0
    notes: int = 0


class RunView:
    """The content of a run's folder. `read` updates it; several threads may call it."""

    def __init__(self, run_dir: Path, link: AccessLink | None = None) -> None:
        """Create a view. `link`: the link of each island, if the user gave it. Raises InputError if
        there is no run.
        """
        find_island_folders(run_dir)
        self.run_dir = run_dir
        self.link = link
        self.islands: dict[str, IslandHistory] = {}
        self.baseline = IslandHistory(run_dir / BASELINE, Groups())
        """Data-parallel training on the same tokens; without rows if there was none."""
        self.groups = Groups()
        self._lock = threading.Lock()
        self._faults = LinesTail(run_dir / LOG)
        self._logbook = LinesTail(run_dir / LOGBOOK)
        self.faults: list[Row] = []
        """Rows of time, kind, islands, text, whether it is the end of a fault (0 or 1)."""
        self.notes: list[Row] = []
        """Entries of the logbook as rows of time, island, text."""

    def read(self) -> Position:
        """Read what is new. Return the position after all rows read so far."""
        with self._lock:
            for folder in island_folders(self.run_dir):
                self.islands.setdefault(folder.name, IslandHistory(folder, self.groups))
            for island in (self.baseline, *self.islands.values()):
                island.read()
            self.faults += [row for line in self._faults.new_lines() if (row := parse_fault(line))]
            self.notes += [row for line in self._logbook.new_lines() if (row := parse_entry(line))]
            counts = {name: island.counts for name, island in self.islands.items()}
            return Position(counts, self.baseline.counts, len(self.groups.names), len(self.faults), len(self.notes))

    def between(self, sent: Position, now: Position) -> dict[str, Any]:
        """Return the rows between two positions, in the form that a page takes. Islands without
        such rows are left out.
        """
        islands = {
            name: rows_between(self.islands[name], sent.islands.get(name, {}), counts)
            for name, counts in now.islands.items()
        }
        baseline = rows_between(self.baseline, sent.baseline, now.baseline)
        return {
            "islands": {name: rows for name, rows in islands.items() if any(rows.values())},
            "baseline": baseline if any(baseline.values()) else None,
            "groups": self.groups.names[sent.groups : now.groups],
            "faults": self.faults[sent.faults : now.faults],
            "notes": self.notes[sent.notes : now.notes],
        }

    def snapshot(self, now: Position) -> dict[str, Any]:
        """Return all rows up to the position, thinned, in the form that a page takes."""
        most = max(100, min(MAX_POINTS, MAX_ROWS // max(len(now.islands), 1)))
        return {
            **describe_run(self.run_dir),
            "islands": {name: self.islands[name].thinned(counts, most) for name, counts in now.islands.items()},
            "baseline": self.baseline.thinned(now.baseline, most) if any(now.baseline.values()) else None,
            "groups": self.groups.names[: now.groups],
            "machines": {name: describe_machine(self.run_dir / name) for name in now.islands},
            "faults": self.faults[: now.faults][-MAX_POINTS:],
            "notes": self.notes[: now.notes][-MAX_POINTS:],
        }


def rows_between(island: IslandHistory, sent: dict[str, int], now: dict[str, int]) -> Rows:
    """Return the island's rows of each kind from count `sent` to count `now`."""
    return {kind: rows[sent.get(kind, 0) : now[kind]] for kind, rows in island.rows.items()}


def parse_fault(line: str) -> Row | None:
    """Return a line of faults.jsonl as a row; None if it is not a record."""
    try:
        values = json.loads(line)
        time = float(values["time"])
        islands = [str(name)[:64] for name in values["islands"]]
        text = str(values["text"])[:MAX_TEXT]
        kind = str(values["kind"])[:64]
        return [time, kind, islands, text, int(bool(values["is_end"]))] if 0 <= time < MAX_TIME else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def parse_entry(line: str) -> Row | None:
    """Return a line of the logbook as a row; None if it is not an entry."""
    if (found := ENTRY.fullmatch(line)) is None:
        return None
    try:
        time = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return [time, found[2], found[3][:MAX_TEXT]]
