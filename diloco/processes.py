"""Child processes of the launcher: each in a session of its own, with a log file, and none left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.signals import end_with_parent

TERMINATE_SECONDS = 8.0
# Else glibc gives a step's large buffers back to the system and faults them in again: 4 to 13 % of a step on a CPU.
# Both, because either alone ends glibc's own adapting of the other.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


@dataclass
class Child:
    """A started process and the file that holds what it prints."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines it printed."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def start(name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Child:
    """Start `command`; everything it prints goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=KEEP_MEMORY | os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(env or {}),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return Child(name, process, log)


def torchrun(num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command that runs `python -m diloco ARGUMENTS` on `num_ranks` ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "-m", "diloco", *arguments]


def stop(children: Sequence[Child]) -> None:
    """End all of them: SIGTERM, then SIGKILL for the process group of any that has not gone in time."""
    for child in children:
        _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_SECONDS
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(child, signal.SIGKILL)
            child.process.wait()


def _signal(child: Child, number: signal.Signals) -> None:
    if child.exit_code is not None:
        return
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return
