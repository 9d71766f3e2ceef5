"""Nodes of an island on one machine: what they reach, and what they see. Needs root."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.network_emulation.namespaces import Namespace, open_net
from diloco.network_emulation.node_view import NodeView
from diloco.network_emulation.sites import build_site

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root"
)
DIAL = """
import socket, sys
from contextlib import suppress
server = socket.create_server((sys.argv[1], 7004))
print("ready", flush=True)
while True:
    connection, (host, _) = server.accept()
    with suppress(OSError): connection.sendall(host.encode())
    connection.close()
"""
ASK = (
    "import socket, sys; print(socket.create_connection((sys.argv[1], 7004), 1).recv(99).decode())"
)


def dial(place: Namespace, host: str) -> str:
    """The address from which a server at `host` sees a client in this namespace, "" if there is no
    way.
    """
    command = place.command(sys.executable, "-S", "-c", ASK, host)
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=30
    ).stdout.strip()


def test_nodes_and_islands_reach_one_another_until_two_nodes_are_cut():
    with open_net() as net:
        outside = net.add()
        site = build_site(net.add(), 2)
        net.route(site.network, site.router)
        later = net.add()
        first, second = site.nodes
        with subprocess.Popen(
            first.command(sys.executable, "-S", "-c", DIAL, first.host), stdout=subprocess.PIPE
        ) as server:
            try:
                assert server.stdout is not None and server.stdout.readline() == b"ready\n"
                for place in (second, outside, later):
                    assert dial(place, first.host) == place.host
                net.cut([first], [second])
                assert dial(second, first.host) == "" and dial(outside, first.host) == outside.host
                net.heal([first], [second])
                assert dial(second, first.host) == second.host
            finally:
                server.kill()


def run_in(view: NodeView, *words: str) -> str:
    """What a command prints that runs with the view, in a mount namespace as that of `ip netns
    exec`.
    """
    command = ["unshare", "--mount", *view.command(*words)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_node_sees_what_is_shared_and_no_other_temporary_file(tmp_path: Path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    view = NodeView(
        "island-0-node-1", {"island-0-node-0": "10.0.0.1"}, [str(shared), str(Path.cwd())]
    )
    look = (
        f"cat {shared}/file; test -e {own} && echo seen; ls /dev/shm; touch "
        f"/dev/shm/diloco-node; touch {shared}/new"
    )
    assert run_in(view, "sh", "-c", look) == "shared"
    assert (shared / "new").exists() and not Path("/dev/shm/diloco-node").exists()


def test_a_node_has_a_host_name_of_its_own_and_knows_those_of_the_others():
    view = NodeView("island-0-node-1", {"island-0-node-0": "10.0.0.1"}, [str(Path.cwd())])
    assert run_in(view, "hostname").strip() == "island-0-node-1"
    assert run_in(view, "getent", "hosts", "island-0-node-0").split() == [
        "10.0.0.1",
        "island-0-node-0",
    ]
    assert socket.gethostname() != "island-0-node-1"
