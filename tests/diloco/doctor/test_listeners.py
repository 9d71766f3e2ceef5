"""Listening sockets of this machine, read from /proc."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from diloco.doctor.listeners import find_rank_stores, read_listeners
from diloco.doctor.machine_checks import check_rank_stores

LISTEN = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_every_kind_of_listener_is_found_with_its_address():
    v6 = socket.has_dualstack_ipv6()
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as near,
        closing(
            socket.create_server(("::", 0), family=socket.AF_INET6) if v6 else socket.socket()
        ) as far,
        closing(socket.socket(type=socket.SOCK_DGRAM)) as datagrams,
        socket.create_connection(near.getsockname()) as connected,
    ):
        datagrams.bind(("0.0.0.0", 0))
        found = {
            (each.protocol, each.host, each.port): each for each in read_listeners([os.getpid()])
        }
        assert not found["tcp", "127.0.0.1", near.getsockname()[1]].is_beyond_loopback
        assert found["udp", "0.0.0.0", datagrams.getsockname()[1]].is_beyond_loopback
        assert not v6 or found["tcp6", "::", far.getsockname()[1]].is_beyond_loopback
        assert ("tcp", "127.0.0.1", connected.getsockname()[1]) not in found


@contextmanager
def listening(port: int, env: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-c", LISTEN, str(port), *arguments]
    with subprocess.Popen(
        command, env=os.environ | env, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with closing(socket.create_server(("0.0.0.0", 0))) as probe:
        return probe.getsockname()[1]


@pytest.mark.parametrize("is_torchrun", [True, False])
def test_a_store_of_ranks_that_anybody_can_reach_is_named(is_torchrun):
    port = free_port()
    env, arguments = (
        ({}, ["torch.distributed.run"]) if is_torchrun else ({"MASTER_PORT": str(port)}, [])
    )
    with listening(port, env, *arguments) as process:
        assert process.stdout is not None and int(process.stdout.readline()) == port
        assert [
            (each.pid, each.port) for each in find_rank_stores() if each.pid == process.pid
        ] == [(process.pid, port)]
        check = check_rank_stores()
        assert (
            check.level == "warning" and f"[0.0.0.0]:{port} of process {process.pid}" in check.text
        )


def test_other_listeners_are_no_stores_of_ranks():
    with listening(0, {}) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert not [each for each in find_rank_stores() if each.pid == process.pid]
