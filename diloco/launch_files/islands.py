"""The islands of a run as a cluster sees them: nodes, GPUs, and the command of each node."""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.config.schema import Config
from diloco.errors import ConfigError

RESTARTS = 3
"""How often the ranks are restarted on their nodes before the cluster restarts all nodes."""
PORT = 29500
"""Port of torchrun's store on the first node, for islands of several nodes."""


@dataclass(frozen=True)
class PlacedIsland:
    """An island on its cluster."""

    run: str
    index: int
    label: str
    nodes: int
    gpus: int
    """Number of GPUs per node, and so of ranks per node."""
    run_key_file: str | None

    @property
    def name(self) -> str:
        """A name that clusters allow: lower case, digits and dashes."""
        return "".join(
            c if c.isalnum() and c.isascii() else "-" for c in f"{self.run}-{self.label}".lower()
        ).strip("-")

    def command(
        self, config: str, head: str, listen_host: str, settings: Sequence[str]
    ) -> list[str]:
        """Return the command of each node. `head` is the first node's address.

        A shell may fill in both addresses.
        """
        values = [
            config,
            f"island.index={self.index}",
            f"island.ranks={self.nodes * self.gpus}",
            *settings,
        ]
        if self.nodes == 1:
            return ["python", "-m", "diloco", "launch", f"--max-restarts={RESTARTS}", *values]
        rendezvous = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={head}:{PORT}",
            f"--rdzv-id={self.name}",
        ]
        shape = [
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.gpus}",
            f"--max-restarts={RESTARTS}",
        ]
        torchrun = ["python", "-m", "torch.distributed.run", *shape, *rendezvous]
        return [*torchrun, "-m", "diloco", "train", *values, f"island.listen_host={listen_host}"]


def place_islands(config: Config, gpus_per_node: int) -> list[PlacedIsland]:
    """Place the islands of the config on nodes with `gpus_per_node` GPUs.

    Raises ConfigError if an island does not fill whole nodes.
    """
    if not config.islands:
        raise ConfigError(
            "islands: the config lists none; give one entry for each, for example islands: "
            "[{ranks: 8}]"
        )
    placed = []
    for index in range(len(config.islands)):
        island = config.for_island(index)
        if island.ranks > gpus_per_node and island.ranks % gpus_per_node:
            raise ConfigError(
                f"islands[{index}].ranks is {island.ranks}, and a node has {gpus_per_node} GPUs; "
                "give a multiple of that number, or at most that number"
            )
        nodes = max(1, island.ranks // gpus_per_node)
        shape = nodes, min(island.ranks, gpus_per_node)
        placed.append(PlacedIsland(config.name, index, island.label, *shape, island.run_key_file))
    return placed


def require_relays(config: Config) -> None:
    """Raise ConfigError unless islands that accept no connections can reach each other."""
    if not config.outer.network.has_routes or not config.island.relays:
        raise ConfigError(
            f"outer.transport is {config.outer.transport} and island.relays "
            f"{list(config.island.relays)}: nodes there have no address that other clusters reach, "
            "so islands must dial out to a relay; start `diloco relay` on a machine with a public "
            "address, and set outer.transport=tls and island.relays=[HOST:PORT]"
        )
