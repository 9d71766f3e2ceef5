"""Socket files that dead daemons left behind are removed, those of daemons that start now are not."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outer.transports.hivemind_daemon import STALE_SECONDS, remove_stale_sockets


@contextmanager
def bound_socket(name: str) -> Iterator[Path]:
    """A socket file that nobody listens on, as that of a dead daemon or of one that is about to listen."""
    path = Path("/tmp") / f"hivemind-{name}-test-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def test_a_daemon_that_is_about_to_listen_keeps_its_socket() -> None:
    with bound_socket("p2pd") as daemon, bound_socket("p2pclient") as client:
        remove_stale_sockets()
        assert daemon.exists() and client.exists()


def test_a_dead_daemon_loses_its_socket() -> None:
    with bound_socket("p2pd") as daemon:
        long_ago = time.time() - STALE_SECONDS - 1
        os.utime(daemon, (long_ago, long_ago))
        remove_stale_sockets()
        assert not daemon.exists()
