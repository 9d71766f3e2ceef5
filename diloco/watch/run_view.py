"""A run's folder, read again and again: its islands, faults, logbook and facts."""

import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.formatting import one_line
from diloco.records.environment import read_environment
from diloco.records.faults import LOG
from diloco.records.logbook import LOGBOOK
from diloco.records.run_folder import RunFacts, find_island_folders, island_folders, read_facts
from diloco.watch.history import MAX_POINTS, MAX_ROWS, MAX_TEXT, MAX_TIME, Groups, IslandHistory, Row, Rows
from inner.errors import InputError

ENTRY = re.compile(r"- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z \*\*(.{1,64}?)\*\* (.*)")


@dataclass
class Position:
    """How much of a run a page has been sent: numbers of rows."""

    islands: dict[str, dict[str, int]] = field(default_factory=dict)
    groups: int = 0
    faults: int = 0
    notes: int = 0


class RunView:
    """All that is known of a run from its folder. `read` brings it up to date; several threads may call it."""

    def __init__(self, run_dir: Path) -> None:
        """Raises InputError if the folder holds no run."""
        find_island_folders(run_dir)
        self.run_dir = run_dir
        self.islands: dict[str, IslandHistory] = {}
        self.groups = Groups()
        self._lock = threading.Lock()
        self._faults, self._logbook = LinesTail(run_dir / LOG), LinesTail(run_dir / LOGBOOK)
        self.faults: list[Row] = []
        """Each is time, kind, islands, text, whether it is the end of a fault (0 or 1)."""
        self.notes: list[Row] = []
        """Entries of the logbook; each is time, island, text."""

    @property
    def facts(self) -> RunFacts | None:
        """What run.json says; None if there is none that can be read."""
        with suppress(InputError, OSError):
            return read_facts(self.run_dir)
        return None

    def read(self) -> Position:
        """Read what is new. The position after all that has been read."""
        with self._lock:
            for folder in island_folders(self.run_dir):
                self.islands.setdefault(folder.name, IslandHistory(folder, self.groups))
            for island in self.islands.values():
                island.read()
            self.faults += [row for line in self._faults.new_lines() if (row := parse_fault(line))]
            self.notes += [row for line in self._logbook.new_lines() if (row := parse_entry(line))]
            counts = {name: island.counts for name, island in self.islands.items()}
            return Position(counts, len(self.groups.names), len(self.faults), len(self.notes))

    def between(self, sent: Position, now: Position) -> dict[str, Any]:
        """The rows after the first position and up to the second, as a page takes them; islands that have any."""
        islands = {
            name: self._rows_between(name, sent.islands.get(name, {}), counts) for name, counts in now.islands.items()
        }
        return {
            "islands": {name: rows for name, rows in islands.items() if any(rows.values())},
            "groups": self.groups.names[sent.groups : now.groups],
            "faults": self.faults[sent.faults : now.faults],
            "notes": self.notes[sent.notes : now.notes],
        }

    def _rows_between(self, name: str, sent: dict[str, int], now: dict[str, int]) -> Rows:
        return {kind: rows[sent.get(kind, 0) : now[kind]] for kind, rows in self.islands[name].rows.items()}

    def snapshot(self, now: Position) -> dict[str, Any]:
        """Everything up to the position, thinned, as a page takes it."""
        facts, most = self.facts, max(100, min(MAX_POINTS, MAX_ROWS // max(len(now.islands), 1)))
        return {
            "name": facts.name if facts else self.run_dir.resolve().name,
            "total_steps": facts.total_steps if facts else None,
            "num_params": facts.num_params if facts else None,
            "bigram_loss": facts.bigram_loss if facts else None,
            "islands": {name: self.islands[name].thinned(counts, most) for name, counts in now.islands.items()},
            "groups": self.groups.names[: now.groups],
            "machines": {name: describe_machine(self.run_dir / name) for name in now.islands},
            "faults": self.faults[: now.faults][-MAX_POINTS:],
            "notes": self.notes[: now.notes][-MAX_POINTS:],
        }


def describe_machine(folder: Path) -> str:
    """The code and hardware of the island's last start in a line; empty if it has not written them."""
    found = read_environment(folder) or {}
    commit = str(found.get("commit") or "")[:10]
    changed = " with changes" if commit and found.get("is_changed") else ""
    gpus = found.get("gpus")
    hardware = Counter(map(str, gpus)) if isinstance(gpus, list) and gpus else {str(found.get("processor") or ""): 1}
    words = [f"{count} x {name}" if count > 1 else name for name, count in hardware.items()]
    return one_line(", ".join(filter(None, [f"commit {commit}{changed}" if commit else "", *words])))[:MAX_TEXT]


class LinesTail:
    """Reads the completed lines of a text file that may still grow or may not exist."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0

    def new_lines(self) -> list[str]:
        """Lines that were completed since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def parse_fault(line: str) -> Row | None:
    """A line of faults.jsonl as a row; None if it is not a record."""
    try:
        values = json.loads(line)
        time, islands = float(values["time"]), [str(name)[:64] for name in values["islands"]]
        text, kind = str(values["text"])[:MAX_TEXT], str(values["kind"])[:64]
        return [time, kind, islands, text, int(bool(values["is_end"]))] if 0 <= time < MAX_TIME else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def parse_entry(line: str) -> Row | None:
    """A line of the logbook as a row; None if it is not an entry."""
    if (found := ENTRY.fullmatch(line)) is None:
        return None
    try:
        time = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return [time, found[2], found[3][:MAX_TEXT]]


def state_now(view: RunView) -> dict[str, Any]:
    """The latest of each island, for `--json`."""
    islands: Sequence[IslandHistory] = list(view.islands.values())
    facts = view.facts
    return {
        "name": facts.name if facts else view.run_dir.resolve().name,
        "total_steps": facts.total_steps if facts else None,
        "islands": [describe_island(island) for island in islands],
        "faults": len([fault for fault in view.faults if not fault[4]]),
    }


def describe_island(island: IslandHistory) -> dict[str, Any]:
    """The latest of one island as values for JSON."""
    latest, rows = island.latest, island.rows
    return {
        "name": latest.name,
        "end": latest.end or None,
        "last_record": latest.time or None,
        "step": latest.step,
        "round": latest.round,
        "tokens": latest.tokens,
        "tokens_per_second": rows["steps"][-1][4] if rows["steps"] else None,
        "loss": next((row[3] for row in reversed(rows["steps"]) if row[3] is not None), None),
        "heldout_loss": rows["evals"][-1][2] if rows["evals"] else None,
        "committed": len(latest.committed),
        "aborted": latest.num_aborted,
        "bytes_sent": latest.bytes_sent,
        "digest": latest.digest,
        "event": latest.event or None,
    }
