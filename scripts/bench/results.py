"""Results of runs, appended to a file as they arrive, so that a stopped benchmark can be
resumed.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


class Results(Generic[R]):
    """The results of one benchmark, in results.jsonl of a folder, which is created if needed."""

    def __init__(self, folder: Path, result: type[R]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"
        self._result = result

    def read(self) -> list[R]:
        """Return all results so far."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [self._result(**json.loads(line)) for line in lines]

    def add(self, result: R) -> None:
        """Append a result."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
