"""The sections of the report, and how each runs in a process of its own. Imports no torch."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any

from scripts.gpu_report.place import ROOT, Place, Row, parse_row

HERE = "scripts.gpu_report"
END_SECONDS = 15.0
"""How long a section that is out of time may take to end the processes that it has started."""
LAST_CHARACTERS = 1500
"""Number of last characters of a failed section's errors that are reported."""


@dataclass(frozen=True)
class Section:
    """One section: a generator of rows."""

    name: str
    source: str
    """Place of the generator, as MODULE:FUNCTION."""
    limit_seconds: float
    min_devices: int = 1


def load_section(source: str) -> Callable[[Place], Iterator[Row]]:
    module, _, function = source.partition(":")
    return getattr(importlib.import_module(module), function)


SECTIONS = (
    Section("environment", f"{HERE}.environment:describe", 12),
    Section("numerics", f"{HERE}.numerics:compare_with_cpu", 70),
    Section("attention", f"{HERE}.attention:time_attention", 20),
    Section("memory", f"{HERE}.memory:compare_peaks", 25),
    Section("speed-150m", f"{HERE}.speed:measure_150m", 60),
    Section("speed-1b", f"{HERE}.speed:measure_1b", 55),
    Section("speed-8b-layers", f"{HERE}.speed:measure_8b_layers", 60),
    Section("step", f"{HERE}.step:watch_a_step", 45),
    Section("outer", f"{HERE}.outer:time_the_seam", 30),
    Section("group", f"{HERE}.group:check_group", 28),
    Section("islands", f"{HERE}.runs:run_two_islands", 75),
    Section("meshes", f"{HERE}.meshes:compare_meshes", 120, min_devices=2),
    Section("hang", f"{HERE}.runs:hang_a_rank", 60, min_devices=2),
)
"""The sections in the order in which they run: those that test least of a GPU are last.

The limits of the sections for one GPU add up to 8 minutes. docs/operating.md has the measured times
behind them.
"""


@dataclass
class SectionReport:
    """The outcome of a section."""

    name: str
    status: str
    """ended, failed, out of time, left out, or does not apply."""
    problem: str = ""
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the section ended or does not apply, and no row has failed or differs."""
        return self.status in ("ended", "does not apply") and all(
            row.get("ok", True) for row in self.rows
        )

    def values(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in ("name", "status", "problem", "seconds", "rows")
        }

    def text(self) -> str:
        head = f"\n== {self.name}: {self.status}, {self.seconds:.0f} s"
        lines = [head + (f"\n   {self.problem}" if self.problem else "")]
        width = max((len(row["name"]) for row in self.rows), default=0)
        for row in self.rows:
            values = ", ".join(
                f"{key} {_format(value)}" for key, value in row.items() if key not in ("name", "ok")
            )
            mark = "  " if row.get("ok", True) else "! "
            lines.append(f"{mark} {row['name']:{width}s}  {values}")
        return "\n".join(lines)


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def find_obstacle(section: Section, num_devices: int) -> str:
    """Return why a section does not run on a machine with `num_devices` GPUs; empty if it does."""
    is_enough = num_devices >= section.min_devices
    return (
        "" if is_enough else f"it takes {section.min_devices} GPUs, and torch finds {num_devices}"
    )


def run_apart(section: Section, place: Place, limit_seconds: float) -> SectionReport:
    """Run a section in a process of its own, for at most `limit_seconds`."""
    command = [
        sys.executable,
        "-m",
        "scripts.gpu_report",
        "--section",
        section.source,
        *place.arguments,
    ]
    started = time.monotonic()
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            process.wait(limit_seconds)
            status = "failed" if process.returncode else "ended"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process)
        rows = _read_rows(_content(output))
        problem = (
            ""
            if status == "ended"
            else _explain(status, limit_seconds, process.returncode, _content(errors))
        )
    return SectionReport(section.name, status, problem, rows, time.monotonic() - started)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a section, if it still runs, and the processes that it has left in its session."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _content(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _read_rows(text: str) -> list[Row]:
    """Return the rows among the lines of a section; libraries may write lines there, too."""
    return [row for line in text.splitlines() for row in parse_row(line)]


def _explain(status: str, limit_seconds: float, returncode: int, errors: str) -> str:
    cause = (
        f"it did not end within {limit_seconds:.0f} s"
        if status == "out of time"
        else f"exit status {returncode}"
    )
    said = errors.strip()[-LAST_CHARACTERS:]
    return f"{cause}; the end of its errors: {said}" if said else cause
