"""Where the report runs, and what its rows are. torch is imported only to count the devices."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
"""One line of a section: a `name`, figures with their unit in the key, and `ok` if checked."""
CPU_DEVICES = 2
"""Number of processes that stand for GPUs with --device cpu."""


@dataclass(frozen=True)
class Place:
    """The device of the report. On a CPU everything has a tiny size."""

    device: str
    """cuda or cpu."""
    with_compile: bool = True

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def patience(self) -> int:
        """Factor for all time limits. They are made for GPUs, and a CPU may be busy."""
        return 10 if self.is_tiny else 1

    @property
    def arguments(self) -> list[str]:
        """The command's arguments that select this place."""
        return ["--device", self.device, "--compile" if self.with_compile else "--no-compile"]

    @property
    def first(self) -> str:
        """The first device, named as in torch."""
        return "cpu" if self.is_tiny else "cuda:0"

    @cached_property
    def num_devices(self) -> int:
        if self.is_tiny:
            return CPU_DEVICES
        import torch

        return torch.cuda.device_count()


def guarded(name: str, measure: Callable[[], Row]) -> Iterator[Row]:
    """Yield the row that `measure` returns, or a row with its error.

    The section then goes on with the next row.
    """
    yield from guarded_rows(name, lambda: [{"name": name, **measure()}])


def guarded_rows(name: str, measure: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows of `measure`, and a row with the error if it fails."""
    try:
        yield from measure()
    except Exception as error:  # noqa: BLE001 - any error is reported
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield {
            "name": name,
            "problem": text if len(text) < 500 else f"{text[:200]} ... {text[-300:]}",
            "ok": False,
        }


def parse_row(line: str) -> list[Row]:
    """Return the row in a line of a section's output; none if a library has written the line."""
    try:
        row = json.loads(line)
    except ValueError:
        return []
    return [row] if isinstance(row, dict) and "name" in row else []
