"""Runs of one small island by the commands that a user gives, which save after every round; and disks to break."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.waits import GUARD_SECONDS
from tests.swarm import TEXT, TINY

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--standalone"]
ROUNDS = 6
SLOW = "island.faults=[slow:0x30]"
"""Time to do something to a disk before the run is over."""


class Place:
    """A config and its text in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "tiny.yaml"
        (folder / "text").mkdir(parents=True)
        for number in range(40):
            (folder / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
        own = [f"data.paths=[{folder / 'text'}]", f"island.cache_dir={folder / 'cache'}"]
        self.values = [*own, "outer.transport=loopback", "outer.start_islands=1", f"outer.rounds={ROUNDS}"]
        self.values += ["island.checkpoint.every_rounds=1"]
        self.config.write_text(TINY)

    def arguments(self, command: str, run_dir: Path, *more: str) -> list[str]:
        """`command` and what it is given."""
        return [command, str(self.config), *self.values, f"island.run_dir={run_dir}", *more]

    def start(self, launcher: list[str], arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
        """A process of its own that writes all it says to `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*launcher, *arguments],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )

    def run(self, run_dir: Path, *more: str, command: str = "train", launcher: list[str] | None = None) -> "Ended":
        """Start it and wait for its end; `launcher` comes before the command's name."""
        log = self.folder / f"said-{len(list(self.folder.glob('said-*')))}.txt"
        process = self.start(launcher or [*PYTHON, "diloco"], self.arguments(command, run_dir, *more), log)
        return ended(process, log)


class Ended:
    """How a process has ended, and what it said."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text

    def well(self) -> "Ended":
        """Itself; fails the test unless the status is 0."""
        assert self.status == 0, f"status {self.status}:\n{self.text[-4000:]}"
        return self


def ended(process: subprocess.Popen[bytes], log: Path) -> Ended:
    """Wait for the end, and kill what does not come to it."""
    try:
        status = process.wait(GUARD_SECONDS)
    finally:
        process.kill()
    return Ended(status, log.read_text(errors="replace"))


def records(folder: Path) -> list[dict]:
    """Whole records of the island in `folder`, of all its lives."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}") and line.startswith("{")]


def digests(folder: Path) -> dict[int, set[str]]:
    """By round: the digests that the island in `folder` has committed, in any of its lives."""
    found: dict[int, set[str]] = {}
    for record in records(folder):
        if record["kind"] == "round" and record["committed"]:
            found.setdefault(record["round"], set()).add(record["digest"])
    return found


def events(folder: Path, name: str) -> list[str]:
    return [record["text"] for record in records(folder) if record["kind"] == "event" and record["name"] == name]


def saved(folder: Path) -> list[str]:
    """Published checkpoints in a folder, by name."""
    return sorted(path.parent.name for path in folder.glob("step-*/manifest.json") if "." not in path.parent.name)


def wait_until(is_so: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when it is so; fails when the process ends before."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        is_over = process.poll() is not None or time.monotonic() > deadline
        assert not is_over, f"it did not happen:\n{log.read_text(errors='replace')[-4000:]}"
        time.sleep(0.02)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory at `folder`. Needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that leaves no byte of the disk free."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    continue
            except OSError:
                continue
    return path
