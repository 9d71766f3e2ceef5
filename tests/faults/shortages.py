"""Shortages that last for some seconds: of memory, file descriptors, threads, and room on disk and
in /dev/shm.

Each function begins one for processes that run, and returns a function that ends it. Disk and
/dev/shm are small file systems of an island's own, which `own_disk` and `own_shared_memory` make;
they and `threads` need root.
"""

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PIDS = Path("/sys/fs/cgroup/pids")
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
DISK_SIZE, SHARED_SIZE = "64m", "16m"
BALLAST = "ballast"
CHUNK = bytes(1 << 16)

End = Callable[[], None]


def memory(pids: Sequence[int]) -> End:
    """No process gets more memory than it has."""
    return _limit(pids, resource.RLIMIT_AS, _address_space)


def files(pids: Sequence[int]) -> End:
    """No process opens more files and connections than it has open."""
    return _limit(pids, resource.RLIMIT_NOFILE, lambda pid: len(os.listdir(f"/proc/{pid}/fd")))


def threads(pids: Sequence[int], group: str) -> End:
    """The processes start no more threads and processes than they have. `group`: name of a control
    group to make.
    """
    folder = PIDS / group
    folder.mkdir()
    for pid in pids:
        with suppress(ProcessLookupError):
            (folder / "cgroup.procs").write_text(str(pid))
    (folder / "pids.max").write_text((folder / "pids.current").read_text())

    def end() -> None:
        (folder / "pids.max").write_text("max")
        while members := (folder / "cgroup.procs").read_text().split():
            for pid in members:
                with suppress(ProcessLookupError):
                    (PIDS / "cgroup.procs").write_text(pid)
        folder.rmdir()  # The kernel's files in it cannot be unlinked, and go with it.

    return end


def room(folder: Path) -> End:
    """Nothing more can be written to the file system of the folder."""
    ballast = folder / BALLAST
    file = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    try:
        with suppress(OSError):
            while True:
                os.write(file, CHUNK)
    finally:
        os.close(file)
    return ballast.unlink


@contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """The folder is a small file system of its own; what is in it is there afterwards, too. Needs
    root.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder.with_name(f"{folder.name}.kept")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["cp", "-a", folder, kept], check=True)
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()
        kept.rename(folder)


def own_shared_memory() -> None:
    """Give this process, and those that it forks, a small /dev/shm of its own. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = f"size={SHARED_SIZE}".encode()
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace")
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, size):
        raise OSError(ctypes.get_errno(), "cannot mount a /dev/shm")


def has_process_groups() -> bool:
    """Whether `threads` can be used here."""
    return os.access(PIDS / "cgroup.procs", os.W_OK)


def _address_space(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _limit(pids: Sequence[int], kind: int, measure: Callable[[int], int]) -> End:
    """Set the soft limit of each process to what it uses now."""
    before = dict[int, tuple[int, int]]()
    for pid in pids:
        with suppress(ProcessLookupError, FileNotFoundError):
            before[pid] = resource.prlimit(pid, kind)
            resource.prlimit(pid, kind, (measure(pid), before[pid][1]))

    def end() -> None:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, kind, limits)

    return end
