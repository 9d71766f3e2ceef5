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
from diloco.network_emulation.nat import masquerade
from diloco.network_emulation.sites import build_site
from diloco.simulate.launch import check_nat
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
CLIENT = "import socket, sys; print(socket.create_connection((sys.argv[1], 7003), 1).recv(99).decode())"


def dialled(place: Namespace, host: str) -> str:
    """The address from which a server at `host` sees a client in this namespace, or "" if the client gets nowhere."""
    command = place.command(sys.executable, "-S", "-c", CLIENT, host)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30).stdout.strip()


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


def test_only_islands_of_the_run_that_have_relays_are_put_behind_a_nat():
    config = parse_config(TINY, ["islands=[{},{}]"])
    with pytest.raises(ConfigError, match="--nat: only tls has relays"):
        check_nat([0], config)
    with pytest.raises(ConfigError, match="--nat: there is no island 2"):
        check_nat([2], parse_config(TINY, ["islands=[{},{}]", "outer.transport=tls"]))
