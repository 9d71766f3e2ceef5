"""Results of runs, a line each, kept as they come: a benchmark that was stopped goes on where it was."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


class Results(Generic[R]):
    """Of one benchmark, in results.jsonl of a folder, which is made."""

    def __init__(self, folder: Path, result: type[R]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._result = folder / "results.jsonl", result

    def read(self) -> list[R]:
        """All so far."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [self._result(**json.loads(line)) for line in lines]

    def add(self, result: R) -> None:
        """Keep one more."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
