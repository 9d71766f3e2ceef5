"""Runs `diloco simulate` in a folder of its own, for benchmarks that compare the results."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 1800.0
LAST_CHARACTERS = 2000


def run_simulation(arguments: list[str]) -> dict[str, Any] | None:
    """Run a simulation and return its summary.json. On failure, print its last lines to stderr and
    return None.
    """
    with TemporaryDirectory(prefix="bench-") as folder:
        run_dir = run_simulation_in(Path(folder), arguments)
        return None if run_dir is None else json.loads((run_dir / "summary.json").read_text())


def run_simulation_in(folder: Path, arguments: list[str]) -> Path | None:
    """Run in the empty `folder` and return the run's folder. On failure, print the last lines and
    return None.
    """
    try:
        return simulate_in(folder, arguments, RUN_SECONDS)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return None


def simulate_in(folder: Path, arguments: list[str], limit_seconds: float) -> Path:
    """Run in the empty `folder` and return the run's folder. Raises RuntimeError with its last
    lines if it fails.
    """
    command = [
        sys.executable,
        "-m",
        "diloco",
        "simulate",
        *arguments,
        "name=run",
        f"island.run_dir={folder}",
    ]
    problem = ""
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            problem = f"it did not end within {limit_seconds:g} s: "
        finally:
            # SIGTERM makes it end its islands. SIGKILL would leave them behind.
            process.terminate()
            process.wait()
    if process.returncode or not (folder / "run" / "summary.json").exists():
        raise RuntimeError(
            problem + (folder / "output.txt").read_text(errors="replace")[-LAST_CHARACTERS:]
        )
    return folder / "run"
