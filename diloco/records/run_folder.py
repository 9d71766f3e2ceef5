"""Reading a run's folder, also while it is being written or after it was killed. No torch here.

runs/NAME/config.yaml  run.json  summary.json  report.html  plots/  LOGBOOK.md
          ISLAND/metrics.jsonl      baseline/metrics.jsonl
"""

import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from diloco.config import ConfigError
from diloco.metrics import EvalRecord, EventRecord, Record, RoundRecord, StepRecord
from inner.errors import InputError

METRICS = "metrics.jsonl"
FACTS = "run.json"
BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the launcher knows of a run and the records do not say; kept in run.json."""

    name: str
    num_params: int
    num_islands: int
    total_steps: int
    """Inner steps each island is to make."""
    bigram_loss: float | None = None
    """Held-out loss of a byte bigram model, nats a token: what any model must beat."""
    created: str = ""
    """ISO 8601, UTC."""
    links: str = ""
    """As `simulate --link` was given, one after the other."""
    wire_bytes_sent: dict[str, int] | None = None
    wire_bytes_received: dict[str, int] | None = None
    """By island: whole frames, headers and all, as the interfaces counted them. None without network namespaces."""


@dataclass
class IslandRecords:
    """The records of one island, each kind in the order written."""

    name: str
    steps: list[StepRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Put the record with its kind."""
        match record:
            case StepRecord():
                self.steps.append(record)
            case RoundRecord():
                self.rounds.append(record)
            case EvalRecord():
                self.evals.append(record)
            case EventRecord():
                self.events.append(record)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """When each record began and ended, unix seconds."""
        steps = [(s.time - s.seconds, s.time) for s in self.steps]
        rounds = [(r.time - r.wait_seconds - r.reduce_seconds, r.time) for r in self.rounds]
        return steps + rounds + [(r.time, r.time) for r in [*self.evals, *self.events]]


@dataclass(frozen=True)
class RunRecords:
    """All that a run's folder holds. `facts` is None when there is no run.json."""

    run_dir: Path
    facts: RunFacts | None
    islands: list[IslandRecords]
    baseline: IslandRecords | None

    @property
    def num_islands(self) -> int:
        """Islands the run was launched with, or has had."""
        return max(self.facts.num_islands if self.facts else 0, len(self.islands))


_PARSER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])
_FACTS_PARSER = TypeAdapter(RunFacts)


class Tail:
    """Reads a metrics.jsonl that may still grow, or not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_malformed = 0
        """Whole lines that are no record: left by a kill in the middle of a line."""
        self._offset = 0

    def new_records(self) -> list[Record]:
        """The records whose lines were completed since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        parsed = [self._parse(line) for line in whole.splitlines() if line.strip()]
        return [record for record in parsed if record is not None]

    def _parse(self, line: bytes) -> Record | None:
        try:
            return _PARSER.validate_json(line)
        except ValidationError:
            self.num_malformed += 1
            return None


def read_run(run_dir: Path) -> RunRecords:
    """Everything recorded so far. Raises InputError when the folder holds no run."""
    folders = island_folders(run_dir)
    if not folders:
        found = sorted(entry.name for entry in run_dir.iterdir())[:8] if run_dir.is_dir() else None
        raise InputError(
            f"no run in {str(run_dir)!r}: looked for {run_dir / 'ISLAND' / METRICS}, "
            + ("but there is no such folder" if found is None else f"found {', '.join(found) or 'nothing'}")
            + "; give the folder of one run, for example runs/quickstart"
        )
    baseline = run_dir / BASELINE
    return RunRecords(
        run_dir=run_dir,
        facts=read_facts(run_dir),
        islands=[read_island(folder) for folder in folders],
        baseline=read_island(baseline) if (baseline / METRICS).is_file() else None,
    )


def read_island(folder: Path) -> IslandRecords:
    """The records of the island whose folder this is."""
    island = IslandRecords(folder.name)
    for record in Tail(folder / METRICS).new_records():
        island.add(record)
    return island


def island_folders(run_dir: Path) -> list[Path]:
    """The folders of islands, whatever their names, that hold metrics; island-2 before island-10."""
    folders = [path.parent for path in run_dir.glob(f"*/{METRICS}") if path.parent.name != BASELINE]
    return sorted(folders, key=lambda folder: natural_key(folder.name))


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts digits in a name as numbers."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def write_facts(run_dir: Path, facts: RunFacts) -> None:
    """Write run.json."""
    write_atomically(run_dir / FACTS, _FACTS_PARSER.dump_json(facts, indent=2).decode() + "\n")


def read_facts(run_dir: Path) -> RunFacts | None:
    """run.json, or None when there is none. Raises InputError when it is damaged."""
    path = run_dir / FACTS
    try:
        return _FACTS_PARSER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(key) for key in problem["loc"]) or "the file"
        raise InputError(
            f"{path} is damaged: {where}: {problem['msg']}; expected the keys {', '.join(fact_names())}. "
            "Delete it to report without them."
        ) from None


def fact_names() -> list[str]:
    """The keys of run.json."""
    return list(RunFacts.__dataclass_fields__)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` in one move: a reader, or a kill, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        # What a write() raises names no file.
        error.filename = error.filename or str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)


class FolderHeld(ConfigError):
    """A running island's folder: what is in it is that island's to write."""


def hold_folder(folder: Path) -> int:
    """Keep other processes out of an island's folder until this file descriptor is closed or this process ends.

    Raises FolderHeld when one has it: both would be the same island to the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise FolderHeld(
            f"a running island uses the folder {str(folder)!r}; stop it first, or give this one another island.name, "
            "island.index or island.run_dir"
        ) from None
    return lock
