"""Socket files that dead processes left behind are removed; those of living ones, and of living daemons, are not."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outer.transports.hivemind_sockets import FOLDER, own_p2p, remove_dead_sockets


@contextmanager
def bound_socket(pid: int, *, listens: bool = False) -> Iterator[Path]:
    """A socket file of this process, on which nobody listens unless told so."""
    path = FOLDER / f"diloco-{pid}-p2pd-test.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        if listens:
            bound.listen()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def a_dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_daemon_that_is_about_to_listen_keeps_its_socket() -> None:
    with bound_socket(os.getpid()) as path:
        remove_dead_sockets()
        assert path.exists()


def test_a_dead_daemon_loses_its_socket() -> None:
    with bound_socket(a_dead_pid()) as path:
        remove_dead_sockets()
        assert not path.exists()


def test_a_daemon_that_outlives_its_rank_keeps_its_socket() -> None:
    with bound_socket(a_dead_pid(), listens=True) as path:
        remove_dead_sockets()
        assert path.exists()


def test_sockets_are_named_after_their_process() -> None:
    assert f"/unix/tmp/diloco-{os.getpid()}-" == own_p2p()._UNIX_SOCKET_PREFIX
