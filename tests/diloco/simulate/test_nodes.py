"""`diloco simulate --nodes`: what it refuses, what it starts on each node, and how an island of
nodes ends.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.config.schema import Config, parse_config
from diloco.errors import ConfigError
from diloco.faults.disturbances import Disturbances
from diloco.network_emulation.namespaces import Namespace
from diloco.network_emulation.sites import Site
from diloco.simulate.checks import check_disturbances
from diloco.simulate.nodes import (
    NodesOf,
    environment,
    nodes_command,
    shared_folders,
    torchrun_command,
)
from tests.swarm import TINY

OPERATING = Path(__file__).parents[3] / "docs" / "operating.md"
TLS = "outer.transport=tls"


def tiny(*overrides: str) -> Config:
    return parse_config(TINY, ["islands=[{ranks: 4},{ranks: 4}]", *overrides])


def nodes_of(config: Config, **settings: object) -> NodesOf:
    nodes = tuple(
        Namespace(f"n{number}", f"10.214.1.{number + 1}", f"n{number}") for number in range(2)
    )
    return NodesOf(
        config,
        config.for_island(1),
        Site(Namespace("r", "10.213.0.1", "v1"), "", nodes),
        **settings,
    )  # pyright: ignore[reportArgumentType]


def test_the_ranks_of_an_island_must_divide_over_its_nodes():
    with pytest.raises(
        ConfigError, match=r"--nodes 3: island 0 has 4 ranks, .* --ranks to a multiple of 3"
    ):
        check_disturbances(Disturbances(nodes=3), tiny(TLS))


def test_each_node_is_started_by_the_torchrun_line_of_the_documentation():
    (line,) = re.findall(r"    (torchrun (?:.*\\\n)*.*)", OPERATING.read_text())
    told = line.replace("\\\n", " ").split()[1:]
    ours = torchrun_command(nodes_of(tiny(TLS)), ["train", "config.yaml"])[3:]
    assert [word for word in ours if word.startswith("-")] == [
        word for word in told if word.startswith("-")
    ]
    assert "island-1-node-0:29500" in ours and ours[ours.index("--nproc-per-node") + 1] == "2"


def test_each_node_listens_at_its_own_address_unless_nobody_reaches_it():
    for is_hidden in (False, True):
        launcher = nodes_command(nodes_of(tiny(TLS), is_hidden=is_hidden), ["train"])
        hosts = [
            [word for word in command if "listen_host" in word]
            for command in json.loads(launcher[-1])
        ]
        listening = [[f"island.listen_host=10.214.1.{number}"] for number in (1, 2)]
        assert hosts == ([[], []] if is_hidden else listening)


def test_each_node_sees_its_share_of_the_islands_gpus():
    island = nodes_of(tiny(TLS), gpus=("4", "5", "6", "7"))
    assert [environment(island, node)[-1] for node in (0, 1)] == [
        f"CUDA_VISIBLE_DEVICES={n}" for n in ("4,5", "6,7")
    ]


def test_nodes_share_the_folders_that_the_config_names(tmp_path: Path):
    (tmp_path / "text").mkdir()
    folders = shared_folders(
        tiny(f"data.paths=[{tmp_path}/text]", f"island.run_key_file={tmp_path}/none")
    )
    assert (
        str(tmp_path / "text") in folders
        and str(Path.cwd()) in folders
        and f"{tmp_path}/none" not in folders
    )


def test_a_node_that_fails_ends_the_others():
    commands = [["sleep", "600"], [sys.executable, "-S", "-c", "raise SystemExit(7)"]]
    command = [sys.executable, "-m", "diloco.simulate.node_launcher", json.dumps(commands)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "diloco: node 1 ended with status 7\n")
