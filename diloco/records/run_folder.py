"""Reads a run's folder, also while the run is writing it or after a kill. Importing this does not
import torch.

runs/NAME/config.yaml  run.json  summary.json  report.html  plots/  LOGBOOK.md
          ISLAND/metrics.jsonl      baseline/metrics.jsonl
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from diloco.errors import FolderInUse
from diloco.records.faults import FaultRecord, read_faults
from diloco.records.figures import LatestRecords
from diloco.records.growing_file import GrowingFile
from diloco.records.metrics import (
    EvalRecord,
    EventRecord,
    PauseRecord,
    Record,
    RoundRecord,
    StepRecord,
    TrafficRecord,
)
from inner.errors import InputError
from inner.files import try_lock, write_atomically
from inner.foreign.files import read_file
from inner.foreign.text import MAX_JSON_BYTES

METRICS = "metrics.jsonl"
PRESENCE = "presence.jsonl"
"""A file in the folder of an island watched over the network: when it answered."""
FACTS = "run.json"
CONFIG = "config.yaml"
BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that only its launcher knows, stored in run.json."""

    name: str
    num_params: int
    num_islands: int
    total_steps: int
    """Number of inner steps that each island will make."""
    bigram_loss: float | None = None
    """Held-out loss of a byte bigram model in nats per token, which any model must beat."""
    created: str = ""
    """Time of creation, ISO 8601, UTC."""
    links: str = ""
    """The values of `simulate --link`, joined."""
    wire_bytes_sent: dict[str, int] | None = None
    wire_bytes_received: dict[str, int] | None = None
    """Bytes by island, counted by its network interface with headers.

    None without network namespaces.
    """


@dataclass
class IslandRecords:
    """The records of one island, by kind, in the order in which they were written."""

    name: str
    steps: list[StepRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    pauses: list[PauseRecord] = field(default_factory=list)
    traffics: list[TrafficRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = [*self.steps, *self.rounds, *self.evals, *self.events, *self.pauses, *self.traffics]
        self.all: list[Record] = sorted(given, key=lambda record: record.time)
        self.latest = LatestRecords(self.name)
        """The figures after all records."""
        for record in self.all:
            self.latest.write(record)

    def add(self, record: Record) -> None:
        """Append the record to `all`, and to `steps`, `rounds`, `evals`, `events`, `pauses` or
        `traffics`.
        """
        self.all.append(record)
        self.latest.write(record)
        getattr(self, f"{record.kind}s").append(record)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each record, in unix seconds."""
        steps = [(s.time - s.seconds, s.time) for s in self.steps]
        rounds = [(r.time - r.wait_seconds - r.reduce_seconds, r.time) for r in self.rounds]
        return steps + rounds + [(r.time, r.time) for r in [*self.evals, *self.events]]


@dataclass(frozen=True)
class RunRecords:
    """The content of a run's folder, or of its folders on several clusters. `facts` is None if
    there is no run.json.
    """

    run_dir: Path
    """The first folder, where reports are written."""
    facts: RunFacts | None
    islands: list[IslandRecords]
    baseline: IslandRecords | None
    faults: list[FaultRecord]

    @property
    def unread_islands(self) -> list[str]:
        """Islands that took part in a round but have no records in these folders."""
        named = {
            name
            for island in self.islands
            for record in island.rounds
            for name in record.participants
        }
        return sorted(named - {island.name for island in self.islands}, key=natural_key)

    @property
    def num_islands(self) -> int:
        """Number of islands that the run was launched with or has had, whichever is larger."""
        return max(
            self.facts.num_islands if self.facts else 0,
            len(self.islands) + len(self.unread_islands),
        )


_PARSER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])
_FACTS_PARSER = TypeAdapter(RunFacts)


def parse_record(line: bytes) -> Record:
    """Return the record in a line of metrics.jsonl.

    Raises ValidationError if the line is no record.
    """
    return _PARSER.validate_json(line)


class Tail:
    """Reads a metrics.jsonl that may still grow or may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GrowingFile(path)

    def new_records(self) -> list[Record]:
        """Return the records whose lines were completed since the last call."""
        records: list[Record] = []
        try:
            lines = self._file.new_lines()
        except FileNotFoundError:
            return []
        for line in lines:
            # A kill in the middle of a line leaves a line that is not a record.
            with suppress(ValidationError):
                records.append(parse_record(line))
        return records


def read_run(run_dir: Path, *others: Path) -> RunRecords:
    """Read all records and facts of a run. `others` are its folders on other clusters.

    Raises InputError if a folder holds no run or is given twice.
    """
    folders = [run_dir, *others]
    if again := [
        folder
        for place, folder in enumerate(folders)
        if folder.resolve() in resolve_all(folders[:place])
    ]:
        raise InputError(
            f"{str(again[0])!r} is given twice: its islands would count twice; give each folder "
            "once"
        )
    check_one_run(folders)
    islands = [read_island(folder) for each in folders for folder in find_island_folders(each)]
    baselines = [
        read_island(each / BASELINE) for each in folders if (each / BASELINE / METRICS).is_file()
    ]
    facts = [found for each in folders if (found := read_facts(each)) is not None]
    faults = sorted(
        (fault for each in folders for fault in read_faults(each)), key=lambda fault: fault.time
    )
    return RunRecords(
        run_dir,
        next(iter(facts), None),
        merge_islands(islands),
        next(iter(baselines), None),
        faults,
    )


def check_one_run(folders: Sequence[Path]) -> None:
    """Raise InputError if the configs in the folders belong to different runs."""
    if len(folders) == 1:
        return
    from diloco.config.schema import load_config  # Importing it takes half a second.

    found = {each: load_config(path).run for each in folders if (path := each / CONFIG).is_file()}
    for other, run in list(found.items())[1:]:
        first, expected = next(iter(found.items()))
        if (run.name, run.hash) != (expected.name, expected.hash):
            raise InputError(
                f"{str(other)!r} is of run {run.name!r} with config {run.hash[:12]}, and "
                f"{str(first)!r} of run "
                f"{expected.name!r} with config {expected.hash[:12]}; give the folders of one run"
            )


def resolve_all(folders: Sequence[Path]) -> set[Path]:
    """Return the absolute paths of the folders, with links resolved."""
    return {folder.resolve() for folder in folders}


def merge_islands(islands: Sequence[IslandRecords]) -> list[IslandRecords]:
    """Merge the records of islands of the same name, the earlier ones first.

    An island that moved has records in two folders. Raises InputError if two folders hold copies.
    """
    merged: dict[str, IslandRecords] = {}
    for island in sorted(islands, key=lambda island: min(island.spans, default=(0.0, 0.0))):
        known = merged.setdefault(island.name, IslandRecords(island.name))
        if known.spans[:1] and known.spans[:1] == island.spans[:1]:
            raise InputError(
                f"two of the folders hold the same records of {island.name!r}: one is a copy, and "
                "its steps would count twice; leave it out"
            )
        for record in island.all:
            known.add(record)
    return sorted(merged.values(), key=lambda island: natural_key(island.name))


def find_island_folders(run_dir: Path) -> list[Path]:
    """Return what `island_folders` returns. Raises InputError if there are none."""
    if not (folders := island_folders(run_dir)):
        found = sorted(entry.name for entry in run_dir.iterdir())[:8] if run_dir.is_dir() else None
        raise InputError(
            f"no run in {str(run_dir)!r}: looked for {run_dir / 'ISLAND' / METRICS}, "
            + (
                "but there is no such folder"
                if found is None
                else f"found {', '.join(found) or 'nothing'}"
            )
            + "; give the folder of one run, for example runs/quickstart"
        )
    return folders


def read_island(folder: Path) -> IslandRecords:
    """Read the records of the island with this folder."""
    island = IslandRecords(folder.name)
    for record in Tail(folder / METRICS).new_records():
        island.add(record)
    return island


def island_folders(run_dir: Path) -> list[Path]:
    """Return the folders with an island's metrics, in natural order: island-2 before island-10."""
    folders = [path.parent for path in run_dir.glob(f"*/{METRICS}") if path.parent.name != BASELINE]
    return sorted(folders, key=lambda folder: natural_key(folder.name))


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the digits in a name as numbers."""
    return [
        (int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)
    ]


def write_facts(run_dir: Path, facts: RunFacts) -> None:
    """Write run.json."""
    write_atomically(run_dir / FACTS, _FACTS_PARSER.dump_json(facts, indent=2).decode() + "\n")


def read_facts(run_dir: Path) -> RunFacts | None:
    """Read run.json; None if there is none. Raises InputError if it is damaged."""
    path = run_dir / FACTS
    try:
        return _FACTS_PARSER.validate_json(read_file(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(key) for key in problem["loc"]) or "the file"
        raise InputError(
            f"{path} is damaged: {where}: {problem['msg']}; expected the keys "
            f"{', '.join(RunFacts.__dataclass_fields__)}. Delete it to report without them."
        ) from None


def hold_folder(folder: Path) -> int:
    """Lock an island's folder until the returned file descriptor is closed or this process ends.

    Raises FolderInUse if another process holds the lock: both would claim to be the same island.
    Raises OSError if the folder cannot be written when the island first starts: its key could not
    be kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_lock(folder / "lock")
    if not try_lock(lock):
        os.close(lock)
        raise FolderInUse(
            f"a running island uses the folder {str(folder)!r}; stop it first, or give this one "
            "another island.name, island.index or island.run_dir"
        )
    return lock


def open_lock(path: Path) -> int:
    """Open the lock file and return its descriptor. Raises OSError."""
    try:
        return os.open(path, os.O_CREAT | os.O_WRONLY)
    except OSError:
        # A restarted island goes on although its disk has become read-only.
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY)
