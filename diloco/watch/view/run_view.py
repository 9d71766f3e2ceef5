"""Read a run's folder repeatedly: its islands, faults, logbook and facts."""

import re
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.formatting import one_line
from diloco.network_emulation.links import AccessLink
from diloco.overview.account import RunAccount
from diloco.overview.overview import page_values
from diloco.records.environment import read_environment
from diloco.records.faults import LOG, parse_fault_record
from diloco.records.figures import RunFigures, combine
from diloco.records.kept_config import RunPlan, read_plan
from diloco.records.logbook import LOGBOOK
from diloco.records.run_folder import BASELINE, find_island_folders, island_folders
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

PLAN_SECONDS = 10.0
"""How often the run's config and facts are read again."""
ENTRY = re.compile(r"- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z \*\*(.{1,64}?)\*\* (.*)")


@dataclass
class SentRows:
    """How much of a run has been sent to a page, as numbers of rows."""

    islands: dict[str, dict[str, int]] = field(default_factory=dict)
    baseline: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    faults: int = 0
    notes: int = 0
    incidents: int = 0


class RunView:
    """The content of a run's folder. `read` updates it; several threads may call it."""

    def __init__(self, run_dir: Path, link: AccessLink | None = None) -> None:
        """Create a view. `link`: the link of each island, if the user gave it. Raises InputError if
        there is no run.
        """
        find_island_folders(run_dir)
        self.run_dir = run_dir
        self.link = link
        self.since = 0.0
        """Unix time since which text and JSON tell incidents. A page lets its reader choose."""
        self.islands: dict[str, IslandHistory] = {}
        self.account = RunAccount()
        """The records read so far, added up: the first lines of the page, `status`, and the
        report.
        """
        self.baseline = IslandHistory(run_dir / BASELINE, Groups(), RunAccount().island(BASELINE))
        """Data-parallel training on the same tokens; without rows if there was none."""
        self.groups = Groups()
        self._lock = threading.Lock()
        self._plan: RunPlan | None = None
        self._planned_at = -PLAN_SECONDS
        self._faults = LinesTail(run_dir / LOG)
        self._logbook = LinesTail(run_dir / LOGBOOK)
        self.faults: list[Row] = []
        """Rows of time, kind, islands, text, whether it is the end of a fault (0 or 1)."""
        self.notes: list[Row] = []
        """Entries of the logbook as rows of time, island, text."""

    def read(self) -> SentRows:
        """Read what is new. Return the position after all rows read so far."""
        with self._lock:
            for folder in island_folders(self.run_dir):
                if folder.name not in self.islands:
                    account = self.account.island(folder.name)
                    self.islands[folder.name] = IslandHistory(folder, self.groups, account)
            for island in (self.baseline, *self.islands.values()):
                island.read()
            self.faults += [row for line in self._faults.new_lines() if (row := parse_fault(line))]
            self.notes += [row for line in self._logbook.new_lines() if (row := parse_entry(line))]
            counts = {name: island.counts for name, island in self.islands.items()}
            return SentRows(
                counts,
                self.baseline.counts,
                len(self.groups.names),
                len(self.faults),
                len(self.notes),
                len(self.account.incidents),
            )

    @property
    def figures(self) -> RunFigures:
        """The figures of the run after the records read so far."""
        return combine([island.latest for island in self.islands.values()])

    @property
    def plan(self) -> RunPlan:
        """What config.yaml and run.json tell of the whole run, read every PLAN_SECONDS."""
        if self._plan is None or time.monotonic() - self._planned_at > PLAN_SECONDS:
            self._plan = read_plan(self.run_dir)
            self._planned_at = time.monotonic()
        return self._plan

    def between(self, sent: SentRows, now: SentRows) -> dict[str, Any]:
        """Return the rows between two positions, in the form that a page takes. Islands without
        such rows are left out.
        """
        islands = {
            name: rows_between(self.islands[name], sent.islands.get(name, {}), counts)
            for name, counts in now.islands.items()
        }
        islands = {name: rows for name, rows in islands.items() if any(rows.values())}
        baseline = rows_between(self.baseline, sent.baseline, now.baseline)
        return {
            "islands": islands,
            "figures": asdict(self.figures) if islands else None,
            "overview": page_values(self.account, self.plan) if islands else None,
            "incidents": [
                each.to_row() for each in self.account.incidents[sent.incidents : now.incidents]
            ],
            "baseline": baseline if any(baseline.values()) else None,
            "groups": self.groups.names[sent.groups : now.groups],
            "faults": self.faults[sent.faults : now.faults],
            "notes": self.notes[sent.notes : now.notes],
        }

    def snapshot(self, now: SentRows) -> dict[str, Any]:
        """Return all rows up to the position, thinned, in the form that a page takes."""
        most = max(100, min(MAX_POINTS, MAX_ROWS // max(len(now.islands), 1)))
        plan = self.plan
        return {
            "name": plan.name,
            "total_steps": plan.num_steps,
            "num_rounds": plan.num_rounds,
            "num_params": plan.facts.num_params if plan.facts else None,
            "figures": asdict(self.figures),
            "overview": page_values(self.account, plan),
            "incidents": [
                each.to_row() for each in self.account.incidents[: now.incidents][-MAX_POINTS:]
            ],
            "islands": {
                name: self.islands[name].thinned(counts, most)
                for name, counts in now.islands.items()
            },
            "baseline": self.baseline.thinned(now.baseline, most)
            if any(now.baseline.values())
            else None,
            "groups": self.groups.names[: now.groups],
            "machines": {name: describe_machine(self.run_dir / name) for name in now.islands},
            "faults": self.faults[: now.faults][-MAX_POINTS:],
            "notes": self.notes[: now.notes][-MAX_POINTS:],
        }


def rows_between(island: IslandHistory, sent: dict[str, int], now: dict[str, int]) -> Rows:
    """Return the island's rows of each kind from count `sent` to count `now`."""
    return {kind: rows[sent.get(kind, 0) : now[kind]] for kind, rows in island.rows.items()}


def describe_machine(folder: Path) -> str:
    """Return one line about the code and hardware at the island's last start; empty if the island
    has not written them.
    """
    found = read_environment(folder) or {}
    commit = str(found.get("commit") or "")[:10]
    changed = " with changes" if commit and found.get("is_changed") else ""
    gpus = found.get("gpus")
    hardware = (
        Counter(map(str, gpus))
        if isinstance(gpus, list) and gpus
        else {str(found.get("processor") or ""): 1}
    )
    words = [f"{count} x {name}" if count > 1 else name for name, count in hardware.items()]
    return one_line(
        ", ".join(filter(None, [f"commit {commit}{changed}" if commit else "", *words]))
    )[:MAX_TEXT]


def parse_fault(line: str) -> Row | None:
    """Return a line of faults.jsonl as a row; None if it is not a record."""
    if (fault := parse_fault_record(line)) is None or not 0 <= fault.time < MAX_TIME:
        return None
    islands = [name[:64] for name in fault.islands]
    return [fault.time, fault.kind[:64], islands, fault.text[:MAX_TEXT], int(fault.is_end)]


def parse_entry(line: str) -> Row | None:
    """Return a line of the logbook as a row; None if it is not an entry."""
    if (found := ENTRY.fullmatch(line)) is None:
        return None
    try:
        moment = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return [moment, found[2], found[3][:MAX_TEXT]]
