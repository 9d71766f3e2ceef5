"""Reads a run's folder, also while the run is writing it or after a kill. Importing this does not import torch.

runs/NAME/config.yaml  run.json  summary.json  report.html  plots/  LOGBOOK.md
          ISLAND/metrics.jsonl      baseline/metrics.jsonl
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from diloco.errors import FolderInUse
from diloco.records.metrics import EvalRecord, EventRecord, Record, RoundRecord, StepRecord
from inner.errors import InputError
from inner.files import try_lock, write_atomically

METRICS = "metrics.jsonl"
FACTS = "run.json"
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
    """Bytes by island as its network interface counted them, headers included. None without network namespaces."""


@dataclass
class IslandRecords:
    """The records of one island, by kind, in the order in which they were written."""

    name: str
    steps: list[StepRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Append the record to `steps`, `rounds`, `evals` or `events`."""
        getattr(self, f"{record.kind}s").append(record)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each record, in unix seconds."""
        steps = [(s.time - s.seconds, s.time) for s in self.steps]
        rounds = [(r.time - r.wait_seconds - r.reduce_seconds, r.time) for r in self.rounds]
        return steps + rounds + [(r.time, r.time) for r in [*self.evals, *self.events]]


@dataclass(frozen=True)
class RunRecords:
    """The content of a run's folder. `facts` is None if there is no run.json."""

    run_dir: Path
    facts: RunFacts | None
    islands: list[IslandRecords]
    baseline: IslandRecords | None

    @property
    def num_islands(self) -> int:
        """Number of islands that the run was launched with or has had, whichever is larger."""
        return max(self.facts.num_islands if self.facts else 0, len(self.islands))


_PARSER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])
_FACTS_PARSER = TypeAdapter(RunFacts)


class Tail:
    """Reads a metrics.jsonl that may still grow or may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_records(self) -> list[Record]:
        """Records whose lines were completed since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            # A kill in the middle of a line leaves a line that is not a record.
            with suppress(ValidationError):
                records.append(_PARSER.validate_json(line))
        return records


def read_run(run_dir: Path) -> RunRecords:
    """Read all records and facts of a run. Raises InputError if the folder holds no run."""
    islands = [read_island(folder) for folder in find_island_folders(run_dir)]
    baseline = read_island(run_dir / BASELINE) if (run_dir / BASELINE / METRICS).is_file() else None
    return RunRecords(run_dir, read_facts(run_dir), islands, baseline)


def find_island_folders(run_dir: Path) -> list[Path]:
    """As `island_folders`. Raises InputError if there are none."""
    if not (folders := island_folders(run_dir)):
        found = sorted(entry.name for entry in run_dir.iterdir())[:8] if run_dir.is_dir() else None
        raise InputError(
            f"no run in {str(run_dir)!r}: looked for {run_dir / 'ISLAND' / METRICS}, "
            + ("but there is no such folder" if found is None else f"found {', '.join(found) or 'nothing'}")
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
    """The folders of the run that hold an island's metrics, in natural order: island-2 before island-10."""
    folders = [path.parent for path in run_dir.glob(f"*/{METRICS}") if path.parent.name != BASELINE]
    return sorted(folders, key=lambda folder: natural_key(folder.name))


def natural_key(name: str) -> list[tuple[int, str]]:
    """A sort key that compares digits in a name as numbers."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def write_facts(run_dir: Path, facts: RunFacts) -> None:
    """Write run.json."""
    write_atomically(run_dir / FACTS, _FACTS_PARSER.dump_json(facts, indent=2).decode() + "\n")


def read_facts(run_dir: Path) -> RunFacts | None:
    """Read run.json; None if there is none. Raises InputError if it is damaged."""
    path = run_dir / FACTS
    try:
        return _FACTS_PARSER.validate_json(path.read_bytes())
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

    Raises FolderInUse if another process holds the lock, because both would claim to be the same island.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_WRONLY)
    if not try_lock(lock):
        os.close(lock)
        raise FolderInUse(
            f"a running island uses the folder {str(folder)!r}; stop it first, or give this one another island.name, "
            "island.index or island.run_dir"
        )
    return lock
