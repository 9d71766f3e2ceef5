"""Child processes of the launcher. Each has its own session and log file, and its whole process
tree can be killed.
"""

import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, NoReturn

from diloco.faults.spec import DAEMON
from diloco.watchdog.signals import MARK, end_with_parent

_log = logging.getLogger(__name__)

TERMINATE_SECONDS = 8.0
KILL_SECONDS = 10.0
# Otherwise glibc returns a step's large buffers to the system and faults them in again, which takes
# 4 to 13 % of a step on a CPU. Both are set because setting either one disables glibc's dynamic
# adjustment of the other.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
NODE = "DILOCO_NODE"
"""Environment variable with the number of a process's node, set in each process of an island of
several nodes."""
LINES_BELOW = 80
"""An upper limit of the lines that an island's other ranks print after one rank has ended with an
error."""
PROC = Path("/proc")
"""The folder in which Linux lists all processes with their environments."""
DAEMON_NAME = "p2pd"
"""Name of the process of a libp2p daemon."""
_numbers = itertools.count()


@dataclass
class Child:
    """A started process, its log file, and the value of the variable MARK in the process and all
    its descendants.

    `env`: environment variables that the process was given in addition to this process's own.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    command: tuple[str, ...]
    mark: str
    env: Mapping[str, str]

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self.process.poll()

    def error_excerpt(self) -> str:
        """Return the last `error:` message in the log, below which other ranks may print many
        lines; else the last lines.
        """
        lines = self.log_tail(LINES_BELOW).splitlines()
        first = max(
            (index for index, line in enumerate(lines) if line.startswith("error: ")), default=None
        )
        if first is None:
            return self.log_tail()
        return "\n".join(
            [lines[first], *takewhile(lambda line: line.startswith("  "), lines[first + 1 :])]
        )

    def log_tail(self, num_lines: int = 15) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-num_lines:])


def start(
    name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Child:
    """Start `command` with its output appended to `log`. If the log cannot be opened, only a
    warning is logged.
    """
    mark = f"{os.getpid()}-{next(_numbers)}"
    env = dict(env or {})
    ours = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: mark}
    with open_log(log) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=KEEP_MEMORY | os.environ | ours | env,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return Child(name, process, log, tuple(command), mark, env)


def open_log(path: Path) -> IO[bytes]:
    """Return the file, opened for appending; if it cannot be opened, a file that discards all
    output.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        _log.warning("%s: no log is written (%s)", path, error.strerror)
        return open(os.devnull, "ab")


def island_command(
    num_ranks: int, arguments: Sequence[str], max_restarts: int = 0, module: str = "diloco"
) -> list[str]:
    """Return the command that runs `python -m MODULE ARGUMENTS` on `num_ranks` ranks of this
    machine.

    When one rank dies, all ranks are started again, at most `max_restarts` times.
    """
    launcher = [
        sys.executable,
        "-m",
        "diloco.runtime.rank_launcher",
        str(num_ranks),
        str(max_restarts),
    ]
    return [*launcher, module, *arguments]


def become_island(num_ranks: int, arguments: Sequence[str], max_restarts: int) -> NoReturn:
    """Replace this process by the one that starts the ranks of an island. Takes the arguments of
    island_command.
    """
    command = island_command(num_ranks, arguments, max_restarts)
    sys.stdout.flush()
    os.execv(command[0], command)


def stop(children: Sequence[Child]) -> None:
    """End the children: SIGTERM, then after TERMINATE_SECONDS SIGKILL for what is left of their
    process trees.
    """
    signal_all(children, signal.SIGCONT)
    for child in children:
        terminate(child)
    deadline = time.monotonic() + TERMINATE_SECONDS
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
    kill(children)


def terminate(child: Child) -> None:
    """Send SIGTERM, as a shell or a cluster's scheduler does, and return at once."""
    _signal_group(child, signal.SIGTERM)


def kill(children: Sequence[Child]) -> None:
    """Kill the children and all their descendants at the same time, and wait until none is left."""
    # All processes are stopped first, so that none sees another die or starts a new one before it
    # is killed.
    signal_all(children, signal.SIGSTOP)
    signal_all(children, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    for child in children:
        child.process.wait(KILL_SECONDS)
    while find_processes(children) and time.monotonic() < deadline:
        time.sleep(0.01)


def signal_all(children: Sequence[Child], number: signal.Signals) -> None:
    """Send a signal to the children and all their descendants."""
    signalled: set[int] = set()
    while new := find_processes(children) - signalled:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        signalled |= new
    for child in children:
        _signal_group(child, number)


def find_processes(children: Sequence[Child]) -> set[int]:
    """Return the process ids of the children and of all their descendants that run.

    Where there is no PROC, a descendant is found only if all its ancestors up to the child run.
    """
    if not PROC.is_dir():
        return find_descendants({child.process.pid for child in children})
    marks = {f"{MARK}={child.mark}".encode() for child in children}
    found: set[int] = set()
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):
            if marks.intersection((folder / "environ").read_bytes().split(b"\0")):
                found.add(int(folder.name))
    return found


def find_descendants(roots: set[int]) -> set[int]:
    """Return the ids of these processes and their descendants that have not ended, by the parents
    that `ps` prints.
    """
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    processes = [line.split() for line in listed.splitlines()]
    parents = {
        int(pid): int(parent) for pid, parent, state in processes if not state.startswith("Z")
    }
    found = roots & parents.keys()
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def find_process(child: Child, name: str) -> set[int]:
    """Return the process ids of a part of an island.

    `name`: `rankN`, `nodeN` (all processes of a node), `agentN` (torchrun), `daemonN`, or DAEMON
    (the daemon of each node).
    """
    found: set[int] = set()
    for pid in find_processes([child]) - {child.process.pid}:
        with suppress(OSError):
            if name in parts_of_island(pid):
                found.add(pid)
    return found


def parts_of_island(pid: int) -> set[str]:
    """Return the names by which `find_process` finds an island's process. Raises OSError if there
    is no such process.
    """
    lines = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
    variables = {name: value for name, _, value in (line.partition("=") for line in lines)}
    node = variables.get(NODE)
    rank = variables.get("RANK")
    parts = {f"node{node}"}
    # Children of a rank or an agent inherit its variables. Only the rank or agent itself leads its
    # session.
    if (PROC / str(pid) / "comm").read_text().strip() == DAEMON_NAME:
        parts |= {DAEMON, f"{DAEMON}{node}"}
    elif os.getsid(pid) == pid:
        parts.add(f"agent{node}" if rank is None else f"rank{rank}")
    return parts


def _signal_group(child: Child, number: signal.Signals) -> None:
    if child.exit_code is None:
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)
