"""Files of the sockets between a rank and its libp2p daemon, and the removal of files whose rank is
dead.

They are in the folder for temporary files. A process that is killed leaves its files behind, so
their names identify their owner: diloco-PID-N-p2pd-....sock belongs to the N-th daemon of process
PID, diloco-PID-N-p2pclient-....sock to PID itself.
"""

import itertools
import os
import re
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from hivemind.p2p import P2P

LONGEST_FOLDER = 50
"""Longest path of the folder. The path of a socket may have at most 107 bytes."""
NAME = re.compile(r"diloco-(\d+)-\d+-p2p(d|client)-.*\.sock")
_numbers = itertools.count()


def socket_folder() -> Path:
    """Return the folder for temporary files (TMPDIR), or /tmp if its path is too long for
    sockets.
    """
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= LONGEST_FOLDER else "/tmp")


def next_prefix() -> str:
    """Return the prefix of the names of the sockets of this process's next daemon."""
    return f"diloco-{os.getpid()}-{next(_numbers)}-"


def named_p2p(prefix: str) -> type[P2P]:
    """Return hivemind's P2P with socket names that begin with `prefix`."""
    return type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{socket_folder()}/{prefix}"})


def remove_sockets(prefix: str) -> None:
    """Remove the files of a daemon that did not start."""
    for path in socket_folder().glob(f"{prefix}*.sock"):
        path.unlink(missing_ok=True)


def remove_dead_sockets() -> None:
    """Remove the socket files of this user that processes left behind when they were killed or
    failed.
    """
    for path in socket_folder().glob("diloco-*.sock"):
        owner = NAME.fullmatch(path.name)
        with suppress(OSError):
            # A daemon lives for some seconds after its rank. A daemon that is starting does not
            # answer yet, but its rank is alive.
            if (
                owner
                and not is_alive(int(owner[1]))
                and path.stat().st_uid == os.getuid()
                and not answers(path)
            ):
                path.unlink()


def is_alive(pid: int) -> bool:
    """Return whether a process with this id runs. An ended process may still be listed, because
    not every container reaps.
    """
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # It belongs to another user, or this is not Linux.
        return True


def answers(path: Path) -> bool:
    """Return whether a process listens on the socket."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        return True
    return False
