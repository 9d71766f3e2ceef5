"""What a case leaves behind: processes, listening sockets, files of sockets, shared memory and
temporary files.

Other tests may run on the machine. So a case has a folder of its own for temporary files, where
libp2p's daemons and torch put their sockets. A file of shared memory counts if it came during the
case and no living process holds it. A process counts if it descends from the test's own: while a
case runs, this process adopts the orphans below it.
"""

import ctypes
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SECONDS = 30.0
"""How long what is ending may take to end. A daemon without ranks ends after 3 s."""
OURS = ("torch_shm_manager",)
"""Helpers of the test's own process."""
SHARED_MEMORY = Path("/dev/shm")
OURS_THERE = r"torch_(\d+)_.*|sem\.mp-.*|nccl-.*|psm_.*|gloo.*"
"""What our libraries call their files of shared memory."""
CACHES = ("torchinductor_",)
"""What the names of folders begin with that libraries keep on purpose."""


@dataclass
class Leftovers:
    """What has been found, in words."""

    found: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.found)

    def __str__(self) -> str:
        return "; ".join(self.found)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fail if the block leaves anything behind. What is left of its processes is killed."""
    with watch_leftovers() as leftovers:
        yield
    assert not leftovers, f"left behind: {leftovers}"


@contextmanager
def watch_leftovers(seconds: float = SECONDS) -> Iterator[Leftovers]:
    """Fill the Leftovers after the block, without failing. They are not looked for if the block
    raises.
    """
    leftovers = Leftovers()
    before, others = snapshot(), set(descendants_of(os.getpid()))
    with own_temporary_folder() as folder:
        adopt_orphans(True)
        try:
            yield leftovers
            leftovers.found = wait_for_nothing(before, folder, others, seconds)
        finally:
            for pid in left_processes(others):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for_nothing(before, folder, others, 2.0)
            adopt_orphans(False)


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A new folder for the temporary files of this process and of those that it starts, removed at
    the end.
    """
    variable, cached = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="case-", dir="/tmp") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = cached
            del os.environ["TMPDIR"]
            os.environ |= {} if variable is None else {"TMPDIR": variable}


def adopt_orphans(is_on: bool) -> None:
    """Make this process the parent of its descendants whose parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on))


def wait_for_nothing(
    before: set[Path], folder: Path, others: set[int], seconds: float
) -> list[str]:
    """Wait until nothing is left. Returns what is left after `seconds`."""
    deadline = time.monotonic() + seconds
    while left := [
        *describe_processes(left_processes(others)),
        *left_shared_memory(before),
        *left_in(folder),
    ]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def left_processes(others: set[int]) -> list[int]:
    """Descendants of this process that are not in `others`. Dead orphans are reaped."""
    found = []
    for pid in descendants_of(os.getpid()):
        if pid in others or name_of(pid) in OURS:
            continue
        if state_of(pid) == "Z":
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        else:
            found.append(pid)
    return found


def describe_processes(pids: Sequence[int]) -> list[str]:
    """Each process with its name and the sockets at which it listens."""
    from diloco.doctor.listeners import read_listeners

    sockets = {pid: [f"{each.host}:{each.port}" for each in read_listeners([pid])] for pid in pids}
    return [
        f"process {pid} ({name_of(pid)}), listening at {sockets[pid] or 'nothing'}" for pid in pids
    ]


def snapshot() -> set[Path]:
    """The files of shared memory that there are now."""
    there = SHARED_MEMORY.iterdir() if SHARED_MEMORY.exists() else ()
    return {path for path in there if re.fullmatch(OURS_THERE, path.name)}


def left_in(folder: Path) -> list[str]:
    """What is in the case's folder for temporary files, apart from the sockets of this process's
    own helpers.
    """
    held = {
        name for pid in children_of(os.getpid()) if name_of(pid) in OURS for name in held_by(pid)
    }
    found = [path for path in folder.iterdir() if not path.name.startswith(CACHES)]
    return [str(path) for path in sorted(found) if not is_held(path, held)]


def left_shared_memory(before: set[Path]) -> list[str]:
    """Files that have come since `before` and that no living process holds."""
    new = snapshot() - before
    held = held_files() if new else set()
    return [str(path) for path in sorted(new) if not is_held(path, held)]


def is_held(path: Path, held: set[str]) -> bool:
    """Whether a living process has the file, or something in the folder, open or mapped, or has its
    pid in its name.
    """
    owner = re.fullmatch(r"torch_(\d+)_.*", path.name)
    if owner is not None and Path("/proc", owner[1]).exists():
        return True
    return any(name == str(path) or name.startswith(f"{path}/") for name in held)


def held_files() -> set[str]:
    """Paths of all files that processes of this machine have open or mapped."""
    return {name for process in Path("/proc").glob("[0-9]*") for name in held_by(int(process.name))}


def held_by(pid: int) -> set[str]:
    """Paths of the files that a process has open or mapped, and of the sockets in its network
    namespace.
    """
    process, held = Path("/proc", str(pid)), set()
    for table in ("maps", "net/unix"):
        with suppress(OSError):
            held |= {
                line.split()[-1]
                for line in (process / table).read_text().splitlines()
                if "/" in line
            }
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                held.add(os.readlink(descriptor))
    return held


def children_of(pid: int) -> list[int]:
    """Pids of the children of all threads of a process, oldest first."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return sorted(found)


def descendants_of(pid: int) -> list[int]:
    """Pids of all processes below a process."""
    found = children_of(pid)
    for child in list(found):
        found += descendants_of(child)
    return found


def name_of(pid: int) -> str:
    """Name of a process; "" if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def state_of(pid: int) -> str | None:
    """State of a process as `ps` shows it, such as T for stopped and Z for dead; None if it is
    gone.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None
