"""faults.jsonl: the faults injected into a run, and their times."""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from diloco.records.best_effort import best_effort

LOG = "faults.jsonl"
"""A file in the run's folder with one FaultRecord per line."""


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """An injected fault and the islands that it hit, or the end of such a fault if `is_end`."""

    spec: str
    kind: str
    islands: tuple[str, ...]
    text: str
    is_end: bool = False
    time: float = field(default_factory=time.time)


_PARSER = TypeAdapter(FaultRecord)


def record_fault(run_dir: Path, record: FaultRecord) -> None:
    """Append the record to the run's faults.jsonl. A failure is logged, and the islands go on."""
    with best_effort(f"{run_dir / LOG} lacks {record.spec}"), (run_dir / LOG).open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_faults(run_dir: Path) -> list[FaultRecord]:
    """Return the faults injected into the run so far, in order. Incomplete lines are ignored."""
    path = run_dir / LOG
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [
        record
        for line in lines
        if line.endswith("\n") and (record := parse_fault_record(line)) is not None
    ]


def parse_fault_record(line: str) -> FaultRecord | None:
    """Return the record in a line of faults.jsonl; None if a full disk has damaged the line."""
    with suppress(ValidationError):
        return _PARSER.validate_json(line)
    return None
