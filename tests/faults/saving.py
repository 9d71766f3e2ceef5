"""Runs of one small island by the user's commands, with a checkpoint after every round, and disks
that fail.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from diloco.cli.main import main
from tests.harness import begin_fork
from tests.swarm import TEXT, TINY, Rank, read_records

Before = Callable[[], None]
ROOT = Path(__file__).parents[2]
DILOCO = f"{sys.executable} -m diloco"
TORCHRUN = (
    f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m"
)
LAUNCHER = f"{sys.executable} -m diloco.runtime.rank_launcher 2 1"
ROUNDS = 6
GUARD_SECONDS = 400.0
SLOW = "island.faults=[slow:0x10]"
"""Slows the run down, so that a test can change a disk before it is over."""

_numbers = itertools.count()


def nothing() -> None:
    """Do nothing before the command."""


class SavingRun:
    """A config with its text in a folder of the test, and commands that run it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "tiny.yaml"
        (folder / "text").mkdir(parents=True)
        for number in range(40):
            (folder / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
        own = [f"data.paths=[{folder / 'text'}]", f"island.cache_dir={folder / 'cache'}"]
        self.values = [
            *own,
            "outer.transport=loopback",
            "outer.start_islands=1",
            f"outer.rounds={ROUNDS}",
        ]
        self.values += ["island.checkpoint.every_rounds=1"]
        self.config.write_text(TINY)

    def arguments(self, command: str, run_dir: Path, *more: str) -> list[str]:
        """Arguments of `command` for this config and run folder."""
        return [
            *command.split(),
            str(self.config),
            *self.values,
            f"island.run_dir={run_dir}",
            *more,
        ]

    def start(self, log: Path, arguments: list[str], before: Before = nothing) -> Rank:
        """Start `diloco ARGUMENTS`, or another program if the first argument begins with a `/`."""
        log.touch()
        pid = os.fork()
        if pid == 0:
            _run_command(log, arguments, before)
        return Rank(pid, log)

    def run(self, run_dir: Path, *more: str, before: Before = nothing) -> "FinishedProcess":
        """Run `diloco train` with these values and wait for its end."""
        return self.end(self.arguments("train", run_dir, *more), before)

    def end(self, arguments: list[str], before: Before = nothing) -> "FinishedProcess":
        """Start a command and wait for its end."""
        return wait_for_end(
            self.start(self.folder / f"said-{next(_numbers)}.txt", arguments, before)
        )


class FinishedProcess:
    """Exit status and output of a process."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text

    def well(self) -> "FinishedProcess":
        """Return self. Fails the test unless the status is 0."""
        assert self.status == 0, f"status {self.status}:\n{self.text[-4000:]}"
        return self


def _run_command(log: Path, arguments: list[str], before: Before) -> NoReturn:
    """Run a command in this forked process, so that torch is imported only once."""
    begin_fork()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        if arguments[0].startswith("/"):
            os.execv(arguments[0], arguments)
        before()
        sys.argv = ["diloco", *arguments]
        main()
    except BaseException:  # noqa: BLE001 - the test finds it in the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(1)


def wait_for_end(process: Rank) -> FinishedProcess:
    """Wait for the end of a process, and kill it if it does not end."""
    try:
        status = process.wait(time.monotonic() + GUARD_SECONDS)
    finally:
        process.signal(signal.SIGKILL)
    return FinishedProcess(status, process.log.read_text(errors="replace"))


def records(folder: Path) -> list[dict]:
    """Complete records of the island in `folder`, over all restarts."""
    return read_records(folder / "metrics.jsonl")


def digests(folder: Path) -> dict[int, set[str]]:
    """Digests that the island in `folder` has committed over all restarts, by round."""
    found: dict[int, set[str]] = {}
    for record in records(folder):
        if record["kind"] == "round" and record["committed"]:
            found.setdefault(record["round"], set()).add(record["digest"])
    return found


def events(folder: Path, name: str) -> list[str]:
    return [
        record["text"]
        for record in records(folder)
        if record["kind"] == "event" and record["name"] == name
    ]


def list_published(folder: Path) -> list[str]:
    """Names of the published checkpoints in a folder."""
    return sorted(
        path.parent.name
        for path in folder.glob("step-*/manifest.json")
        if "." not in path.parent.name
    )


def wait_until(is_so: Callable[[], object], process: Rank) -> None:
    """Wait until `is_so()` is true. Fails the test with the output of the process if that does not
    happen.
    """
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, (
            f"it did not happen:\n{process.log.read_text(errors='replace')[-4000:]}"
        )
        time.sleep(0.02)


@contextmanager
def mount_tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory at `folder` and unmount it at exit. Needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file that leaves no byte of the disk free."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    continue
            except OSError:
                continue
    return path
