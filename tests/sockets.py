"""Looks at the sockets at which the processes of a test listen."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from diloco.doctor.listeners import ListeningSocket, read_listeners

MARK = "DILOCO_SOCKETS_OF"


def marked(folder: Path) -> Mapping[str, str]:
    """Environment of the processes to look at, with what clusters set for all of their jobs."""
    return {MARK: str(folder), "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}


def watch_sockets(
    folder: Path, is_over: Callable[[], bool], seconds: float = 240
) -> set[ListeningSocket]:
    """All sockets at which the processes marked with `folder` have listened until `is_over()`."""
    seen: set[ListeningSocket] = set()
    deadline = time.monotonic() + seconds
    while not is_over():
        assert time.monotonic() < deadline, "it took too long"
        seen |= set(read_listeners(marked_processes(folder)))
        time.sleep(0.2)
    return seen


def marked_processes(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def beyond_loopback(seen: set[ListeningSocket], *allowed: str) -> list[str]:
    """The sockets that other machines can reach, apart from those at the addresses `allowed`."""
    return [str(each) for each in seen if each.is_beyond_loopback and each.host not in allowed]
