"""`diloco simulate --nodes`: build the command that starts an island of several nodes, each like
its own machine.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.config.schema import Config, IslandConfig
from diloco.errors import ConfigError
from diloco.network_emulation.node_view import NodeView
from diloco.network_emulation.sites import Site
from diloco.runtime.devices.gpus import VISIBLE

PROGRAM = Path(__file__).parents[2]
"""The folder that holds the packages."""
PORT = 29500
"""Port of torchrun's rendezvous on an island's first node."""
MAX_RESTARTS = 3


def check_nodes(config: Config, num_nodes: int) -> None:
    """Raise ConfigError if the islands cannot be divided over `num_nodes` nodes."""
    for index in range(len(config.islands)):
        ranks = config.for_island(index).ranks
        if ranks % num_nodes:
            raise ConfigError(
                f"--nodes {num_nodes}: island {index} has {ranks} ranks, which do not divide over "
                f"its nodes; set --ranks to a multiple of {num_nodes}"
            )


@dataclass(frozen=True)
class NodesOf:
    """The nodes of one of the config's islands. `gpus` is empty, or has a GPU for each rank."""

    config: Config
    island: IslandConfig
    site: Site
    gpus: Sequence[str] = ()
    is_hidden: bool = False
    """Whether other islands cannot reach the nodes."""

    @property
    def hosts(self) -> dict[str, str]:
        """Address of each node, by host name."""
        names = (
            f"island-{self.island.index}-node-{number}" for number in range(len(self.site.nodes))
        )
        return {name: node.host for name, node in zip(names, self.site.nodes, strict=True)}


def nodes_command(island: NodesOf, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `python -m diloco ARGUMENTS` on all ranks of the island, by
    torchrun on each node.
    """
    torchrun = torchrun_command(island, arguments)
    hosts = island.hosts
    shared = shared_folders(island.config)
    commands = []
    for number, (name, node) in enumerate(zip(hosts, island.site.nodes, strict=True)):
        own = [] if island.is_hidden else [f"island.listen_host={node.host}"]
        command = node.command(*NodeView(name, hosts, shared).command(*torchrun, *own))
        commands.append([*environment(island, number), *command])
    return [sys.executable, "-m", "diloco.simulate.node_launcher", json.dumps(commands)]


def torchrun_command(island: NodesOf, arguments: Sequence[str]) -> list[str]:
    """Return the command that an operator starts on each node (docs/operating.md)."""
    num_nodes = len(island.site.nodes)
    label = island.island.label
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(num_nodes), "--nproc-per-node", str(island.island.ranks // num_nodes)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{next(iter(island.hosts))}:{PORT}"),
        *("--rdzv-id", f"{island.config.name}-{label}", "--max-restarts", str(MAX_RESTARTS)),
        *("-m", "diloco", *arguments),
    ]


def environment(island: NodesOf, node: int) -> list[str]:
    """Return the words in front of a node's command that give its ranks their share of the island's
    GPUs.
    """
    count = len(island.gpus) // len(island.site.nodes)
    return (
        ["env", f"{VISIBLE}={','.join(island.gpus[node * count : (node + 1) * count])}"]
        if island.gpus
        else []
    )


def shared_folders(config: Config) -> list[str]:
    """Return the folders that all nodes of a cluster see: the program, the working folder, and all
    that the config names.
    """
    program = [str(path) for path in (PROGRAM, Path(sys.prefix), Path.cwd())]
    named = (
        os.path.abspath(os.path.expanduser(text))
        for text in texts_in(config.model_dump(mode="json"))
    )
    return sorted({*program, *filter(os.path.exists, named)})


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in the values of a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_in(inner)
