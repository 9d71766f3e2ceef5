"""Socket files that dead processes left behind are removed; those of living ones, and of living
daemons, are not.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("hivemind")

from outer.errors import InputError, UnreachableError
from outer.transports.hivemind_daemon import DaemonSettings, start_daemon
from outer.transports.hivemind_sockets import remove_dead_sockets, remove_sockets, socket_folder
from tests.outer.nets import run

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@contextmanager
def bound_socket(pid: int, *, listens: bool = False) -> Iterator[Path]:
    """A socket file of this process, on which nobody listens unless told so."""
    path = socket_folder() / f"diloco-{pid}-999-p2pd-test.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        if listens:
            bound.listen()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def own_sockets() -> set[Path]:
    return set(socket_folder().glob(f"diloco-{os.getpid()}-*.sock"))


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


def test_a_daemon_that_did_not_start_loses_its_socket_and_no_other_does() -> None:
    with bound_socket(os.getpid()) as path:
        remove_sockets(f"diloco-{os.getpid()}-99-")
        assert path.exists()
        remove_sockets(f"diloco-{os.getpid()}-999-")
        assert not path.exists()


def test_a_daemon_that_cannot_reach_its_peers_leaves_no_socket() -> None:
    settings = DaemonSettings(
        ["/ip4/127.0.0.1/tcp/0"], bootstrap=[f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"], connect_seconds=1
    )
    # Daemons that earlier tests of this process have killed leave theirs until the process ends.
    before = own_sockets()
    with pytest.raises(UnreachableError):
        run(start_daemon(settings))
    assert own_sockets() <= before


def test_a_port_at_which_another_process_listens_is_refused_and_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outer.transports.hivemind_daemon.PORT_SECONDS", 1.0)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as libp2p sets it
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        with pytest.raises(
            InputError, match=f"cannot listen on {address}: Address already in use; choose another"
        ):
            run(start_daemon(DaemonSettings([address])))
