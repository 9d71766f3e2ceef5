"""Child processes of the launcher: each in a session of its own, with a log file, and none left behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from diloco.signals import end_with_parent

TERMINATE_SECONDS = 8.0
KILL_SECONDS = 10.0
# Else glibc gives a step's large buffers back to the system and faults them in again: 4 to 13 % of a step on a CPU.
# Both, because either alone ends glibc's own adapting of the other.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


MARK = "DILOCO_CHILD"
"""In the environment of a child and all that it starts: torchrun puts its workers into sessions of their own, and what
a killed worker leaves has no parent any more."""
LINES_OF_TORCHRUN = 80
"""More than it prints when a rank has ended."""
_numbers = itertools.count()


@dataclass
class Child:
    """A started process, the file that holds what it prints, and what marks it and all that it starts."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    command: tuple[str, ...]
    mark: str

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def last_words(self) -> str:
        """The last error that it told its user of, which torchrun writes much below; else the last lines it printed."""
        lines = self.log_tail(LINES_OF_TORCHRUN).splitlines()
        errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
        if not errors:
            return self.log_tail()
        first = errors[-1]
        return "\n".join([lines[first], *takewhile(lambda line: line.startswith("  "), lines[first + 1 :])])

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines it printed."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def start(name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Child:
    """Start `command`; everything it prints goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{next(_numbers)}"
    ours = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: mark}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=KEEP_MEMORY | os.environ | ours | dict(env or {}),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return Child(name, process, log, tuple(command), mark)


def torchrun(num_ranks: int, arguments: Sequence[str], max_restarts: int = 0) -> list[str]:
    """The command that runs `python -m diloco ARGUMENTS` on `num_ranks` ranks of this machine.

    When one of them dies, all are started again, `max_restarts` times.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--max-restarts", str(max_restarts), "-m", "diloco", *arguments]


def stop(children: Sequence[Child]) -> None:
    """End all of them: SIGTERM, then SIGKILL for whatever they started that has not gone in time."""
    signal_all(children, signal.SIGCONT)
    for child in children:
        terminate(child)
    deadline = time.monotonic() + TERMINATE_SECONDS
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue
    kill(children)


def terminate(child: Child) -> None:
    """Ask it to end, as a shell or a cluster's scheduler does; returns at once."""
    _signal_group(child, signal.SIGTERM)


def kill(children: Sequence[Child]) -> None:
    """End them and all that they have started, at once, and wait until none is left."""
    # Stopped first, so that nobody sees another die, or starts one more, before its own end.
    signal_all(children, signal.SIGSTOP)
    signal_all(children, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    for child in children:
        child.process.wait(KILL_SECONDS)
    while processes_of(children) and time.monotonic() < deadline:
        time.sleep(0.01)


def signal_all(children: Sequence[Child], number: signal.Signals) -> None:
    """Send a signal to each of them and to all that they have started."""
    told: set[int] = set()
    while new := processes_of(children) - told:
        for pid in new:
            _signal(pid, number)
        told |= new
    for child in children:
        _signal_group(child, number)


def processes_of(children: Sequence[Child]) -> set[int]:
    """The processes that carry a child's mark (Linux; elsewhere none are found)."""
    marks = {f"{MARK}={child.mark}".encode() for child in children}
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if marks.intersection(environment.split(b"\0")):
            found.add(int(folder.name))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_group(child: Child, number: signal.Signals) -> None:
    if child.exit_code is not None:
        return
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return
