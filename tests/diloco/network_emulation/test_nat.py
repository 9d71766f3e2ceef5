"""A namespace behind a NAT reaches others, which do not reach it. Needs root and nft."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.config.schema import parse_config
from diloco.errors import ConfigError
from diloco.network_emulation.namespaces import Namespace, ip, list_namespaces, open_net
from diloco.network_emulation.nat import enclose, forget_connections, masquerade
from diloco.network_emulation.sites import build_site
from diloco.simulate.checks import check_hidden
from tests.swarm import TINY

CAN = os.geteuid() == 0 and shutil.which("ip") and shutil.which("nft")
SERVER = """
import socket
with socket.create_server(("", 7003)) as server:
    print("ready", flush=True)
    while True:
        connection, (host, _) = server.accept()
        connection.sendall(host.encode())
        connection.close()
"""
ECHO = """
import socket
with socket.create_server(("", 7004)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while said := connection.recv(99):
        connection.sendall(said)
"""
ASKER = """
import socket, sys
with socket.create_connection((sys.argv[1], 7004), 10) as connection:
    for line in sys.stdin:
        connection.settimeout(float(line))
        connection.sendall(b"x")
        try:
            print(connection.recv(9).decode(), flush=True)
        except TimeoutError:
            print("nothing", flush=True)
"""
CLIENT = (
    "import socket, sys; print(socket.create_connection((sys.argv[1], 7003), 1).recv(99).decode())"
)


def dialled(place: Namespace, host: str) -> str:
    """The address from which a server at `host` sees a client in this namespace, or "" if the
    client gets nowhere.
    """
    command = place.command(sys.executable, "-S", "-c", CLIENT, host)
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=30
    ).stdout.strip()


@pytest.mark.skipif(not CAN, reason="a NAT needs root and nft")
def test_what_is_behind_a_nat_dials_out_by_its_routers_address_and_is_not_reached(tmp_path: Path):
    with open_net() as net:
        outside, router = net.add(), net.add()
        (inside,) = build_site(router, 1).nodes
        masquerade(router)
        ip("-n", outside.name, "route", "add", f"{inside.host}/32", "via", router.host)
        for place in (outside, inside):
            command = place.command(sys.executable, "-S", "-c", SERVER)
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
                if place is outside:
                    assert dialled(inside, outside.host) == router.host
                else:
                    assert dialled(outside, inside.host) == dialled(outside, router.host) == ""
                    assert dialled(inside, inside.host) == inside.host
            finally:
                process.kill()
                process.wait()
        name = inside.name
    assert name not in list_namespaces()


@pytest.mark.skipif(
    not CAN or shutil.which("conntrack") is None, reason="a NAT needs root, nft and conntrack"
)
def test_a_nat_that_forgets_leaves_open_connections_dead_and_lets_new_ones_through():
    with open_net() as net:
        outside, router = net.add(), net.add()
        (inside,) = build_site(router, 1).nodes
        masquerade(router)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(outside.command(sys.executable, "-S", "-c", ECHO), **pipes) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            with subprocess.Popen(
                inside.command(sys.executable, "-S", "-c", ASKER, outside.host), **pipes
            ) as client:
                assert client.stdin is not None and client.stdout is not None
                heard = []
                for seconds in (10, 1):
                    client.stdin.write(f"{seconds}\n")
                    client.stdin.flush()
                    heard.append(client.stdout.readline().strip())
                    forget_connections(router)
                client.kill()
            server.kill()
        with subprocess.Popen(
            outside.command(sys.executable, "-S", "-c", SERVER), **pipes
        ) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            assert dialled(inside, outside.host) == router.host
            server.kill()
    assert heard == ["x", "nothing"]


@pytest.mark.skipif(not CAN, reason="a closed cluster needs root and nft")
def test_what_is_behind_a_closed_router_gets_nowhere_but_the_router_does():
    with open_net() as net:
        outside, router = net.add(), net.add()
        site = build_site(router, 2)
        enclose(router)
        with subprocess.Popen(
            outside.command(sys.executable, "-S", "-c", SERVER), stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            assert (
                dialled(site.nodes[0], outside.host) == ""
                and dialled(router, outside.host) == router.host
            )
            server.kill()
        first, second = site.nodes
        with subprocess.Popen(
            first.command(sys.executable, "-S", "-c", SERVER), stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            assert dialled(second, first.host) == second.host
            server.kill()


def test_only_islands_of_the_run_that_have_relays_are_put_behind_a_nat():
    config = parse_config(TINY, ["islands=[{},{}]"])
    with pytest.raises(ConfigError, match="--nat: only tls has relays"):
        check_hidden("--nat", [0], config)
    with pytest.raises(ConfigError, match="--nat: there is no island 2"):
        check_hidden("--nat", [2], parse_config(TINY, ["islands=[{},{}]", "outer.transport=tls"]))
