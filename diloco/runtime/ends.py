"""Why an island's processes have ended: found by the launcher of its ranks, written into the
island's records.
"""

import signal
from contextlib import suppress
from pathlib import Path

from diloco.watchdog.rank_notes import FIRST_RANK, FOLDER, read_note

MEMORY_FILES = ("memory.events", "memory.oom_control")
"""Files of a control group (version 2, version 1) with the number of processes that the kernel
ended.
"""
CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")
COUNTER = "oom_kill"


def count_memory_kills(
    cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS, vmstat: Path = VMSTAT
) -> int | None:
    """Return how many processes the kernel has ended for lack of memory: in this control group,
    else on this machine.

    None if the system does not count them.
    """
    for path in [*find_memory_files(cgroups, own_groups), vmstat]:
        with suppress(OSError, ValueError):
            fields = dict(
                line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line
            )
            if COUNTER in fields:
                return int(fields[COUNTER])
    return None


def find_memory_files(cgroups: Path, own_groups: Path) -> list[Path]:
    """Return the counting files of this process's control group that may exist, the most specific
    first.
    """
    with suppress(OSError):
        groups = [
            line.split(":", 2)
            for line in own_groups.read_text().splitlines()
            if line.count(":") >= 2
        ]
        v2 = [
            cgroups / path.lstrip("/") / MEMORY_FILES[0]
            for number, _, path in groups
            if number == "0"
        ]
        v1 = [
            cgroups / "memory" / path.lstrip("/") / MEMORY_FILES[1]
            for _, kind, path in groups
            if kind == "memory"
        ]
        # In a container the group's own path is often mounted as the root.
        return [*v2, *v1, cgroups / MEMORY_FILES[0], cgroups / "memory" / MEMORY_FILES[1]]
    return []


def describe_end(rank: int, code: int, *, noun: str = "rank", memory_kills: int = 0) -> str:
    """Return how a rank has ended. `code`: Popen.returncode; `memory_kills`: processes that the
    kernel ended since.
    """
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    memory = ""
    if code == -signal.SIGKILL and memory_kills > 0:
        memory = (
            f", for lack of memory: the kernel ended {memory_kills} "
            f"process{'es' * (memory_kills > 1)} meanwhile"
        )
    return f"{noun} {rank} {how}{memory}"


def record_end(notes: int | None, rank: int, text: str) -> None:
    """Write the end of an island into its logbook and its metrics, with the last lines that the
    rank has logged.

    Does nothing if the ranks ended before their island had its folder.
    """
    folder = read_note(notes, FOLDER)
    if not folder or not Path(folder).is_dir():
        return
    from diloco.records.logbook import Logbook  # The launcher itself starts without these imports.
    from diloco.records.metrics import EventRecord, Metrics
    from diloco.records.run_folder import METRICS

    last = " | ".join(read_note(notes, FIRST_RANK + rank).splitlines())
    told = f"{text}; its log ended with: {last}" if last else text
    path = Path(folder)
    metrics = Metrics(path / METRICS)
    metrics.write(EventRecord(name="died", text=told))
    metrics.close()
    Logbook(path.parent, path.name).note("died", told)
