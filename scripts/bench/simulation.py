"""A run of `diloco simulate` in a folder of its own, for benches that compare what comes of it."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 1800.0


def simulated(arguments: list[str]) -> dict[str, Any] | None:
    """The run's summary.json; None when it failed, and then its last lines are on stderr."""
    with TemporaryDirectory(prefix="bench-") as folder:
        run_dir = simulated_in(Path(folder), arguments)
        return None if run_dir is None else json.loads((run_dir / "summary.json").read_text())


def simulated_in(folder: Path, arguments: list[str]) -> Path | None:
    """The run's own folder in an empty `folder`; None when it failed, and then its last lines are on stderr."""
    command = [sys.executable, "-m", "diloco", "simulate", *arguments, "name=run", f"island.run_dir={folder}"]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            process.wait(RUN_SECONDS)
        finally:
            # Asked to, it ends the islands; killed, it would leave them behind.
            process.terminate()
            process.wait()
    if process.returncode or not (folder / "run" / "summary.json").exists():
        print((folder / "output.txt").read_text(errors="replace")[-2000:], file=sys.stderr)
        return None
    return folder / "run"
