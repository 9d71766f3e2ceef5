"""Files of the sockets by which a rank and its libp2p daemon talk, and the removal of those whose rank is dead.

They are in the folder for temporary files. A process that is killed leaves its own behind, so their names say whose
they are: diloco-PID-N-p2pd-....sock is that of the N-th daemon of process PID, diloco-PID-N-p2pclient-....sock its own.
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
"""The path of a socket has 107 bytes at most."""
NAME = re.compile(r"diloco-(\d+)-\d+-p2p(d|client)-.*\.sock")
_numbers = itertools.count()


def socket_folder() -> Path:
    """The folder for temporary files (TMPDIR), or /tmp if its path is too long for sockets."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= LONGEST_FOLDER else "/tmp")


def next_prefix() -> str:
    """What the names of the sockets of this process's next daemon begin with."""
    return f"diloco-{os.getpid()}-{next(_numbers)}-"


def named_p2p(prefix: str) -> type[P2P]:
    """hivemind's P2P, whose sockets have names that begin with `prefix`."""
    return type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{socket_folder()}/{prefix}"})


def remove_sockets(prefix: str) -> None:
    """Remove the files of a daemon that did not start."""
    for path in socket_folder().glob(f"{prefix}*.sock"):
        path.unlink(missing_ok=True)


def remove_dead_sockets() -> None:
    """Remove the socket files of this user that processes left behind when they were killed or failed."""
    for path in socket_folder().glob("diloco-*.sock"):
        owner = NAME.fullmatch(path.name)
        with suppress(OSError):
            # A daemon lives on for seconds after its rank. One that starts is not there for others, but its rank lives.
            if owner and not is_alive(int(owner[1])) and path.stat().st_uid == os.getuid() and not answers(path):
                path.unlink()


def is_alive(pid: int) -> bool:
    """Whether a process with this number runs. One that has ended may still be listed: not every container reaps."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # It belongs to another user, or this is not Linux.
        return True


def answers(path: Path) -> bool:
    """Whether something listens on the socket."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        return True
    return False
