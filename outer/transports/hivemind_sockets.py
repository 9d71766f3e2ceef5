"""Files of the sockets by which a rank and its libp2p daemon talk, and the removal of those whose rank is dead.

hivemind puts them into /tmp. A process that is killed leaves its own behind, so their names say whose they are:
/tmp/diloco-PID-p2pd-....sock is the daemon's that process PID has started, /tmp/diloco-PID-p2pclient-....sock its own.
"""

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from hivemind.p2p import P2P

FOLDER = Path("/tmp")
NAME = re.compile(r"diloco-(\d+)-p2p(d|client)-.*\.sock")


def own_p2p() -> type[P2P]:
    """hivemind's P2P, with sockets that are named after this process."""
    return type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{FOLDER}/diloco-{os.getpid()}-"})


def remove_dead_sockets() -> None:
    """Remove the socket files of this user that processes left behind when they were killed or failed."""
    for path in FOLDER.glob("diloco-*.sock"):
        owner = NAME.fullmatch(path.name)
        with suppress(OSError):
            # A daemon lives on for seconds after its rank. One that starts is not there for others, but its rank lives.
            if owner and not is_alive(int(owner[1])) and path.stat().st_uid == os.getuid() and not answers(path):
                path.unlink()


def is_alive(pid: int) -> bool:
    """Whether there is a process with this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def answers(path: Path) -> bool:
    """Whether something listens on the socket."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        return True
    return False
