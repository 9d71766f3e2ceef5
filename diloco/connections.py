"""Opens the connections of one rank to other islands."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from diloco.config.from_swarm import parse_swarm_config, swarm_text
from diloco.config.overrides import differing_keys
from diloco.config.own_code import find_other_code
from diloco.config.schema import IslandConfig, RunConfig
from diloco.errors import ConfigError
from diloco.runtime.evaluation import SharedEvaluations
from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.errors import DifferingConfigsError
from outer.identity.access import BANNED_FILE
from outer.identity.island_key import KEY_FILE, IslandKey, load_island_key
from outer.identity.known_names import NAMES_FILE
from outer.network.event_loop import EventLoop, EventLoopThread
from outer.network.run_key import load_run_key
from outer.space.ranks import RankGroup
from outer.transports.loopback import Hub

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Shared:
    """The parts that the islands of one process share."""

    hub: Hub
    event_loop: EventLoopThread
    turns: threading.Semaphore
    """Limits how many islands compute at the same time."""
    evaluations: SharedEvaluations


@contextmanager
def open_connections(
    config: RunConfig, island: IslandConfig, ranks: RankGroup, folder: Path, shared: Shared | None
) -> Iterator[tuple[Network, EventLoop]]:
    """Open the connections of one rank to other islands, and yield them with their event loop.

    Every rank of the island must enter it. `shared` is given if other islands run in this process.
    """
    # An island that is alone in its process has a hub, the loopback network, for itself.
    hub, event_loop = (
        (Hub(), EventLoopThread()) if shared is None else (shared.hub, shared.event_loop)
    )
    with ExitStack() as stack:
        if shared is None:
            stack.callback(event_loop.close)
        network = connect(
            config, ranks, event_loop, build_network_settings(config, island, ranks, folder, hub)
        )
        stack.callback(close_network, network, event_loop)
        yield network, event_loop


def build_network_settings(
    config: RunConfig, island: IslandConfig, ranks: RankGroup, folder: Path, hub: Hub
) -> NetworkSettings:
    """Return who this rank is on the network, and how it connects. Every rank calls it together."""
    # The island's ranks trust each other, and all of them sign with its key.
    key = IslandKey(ranks.on_leader(lambda: load_island_key(folder / KEY_FILE).secret))
    # Settings that have the same name in both are copied from the island's config.
    names = {field.name for field in fields(NetworkSettings)} & IslandConfig.model_fields.keys()
    return NetworkSettings(
        run_id=config.name,
        island=island.label,
        rank=ranks.rank,
        run_key=load_run_key(island.run_key_file),
        island_key=key,
        names_path=folder / NAMES_FILE if ranks.is_leader else None,
        ban_files=[folder / BANNED_FILE, folder.parent / BANNED_FILE],
        # The nodes of an island share its folder, and each has a libp2p daemon with its own key.
        identity_path=folder
        / ("identity.key" if ranks.is_leader else f"identity-{ranks.rank}.key"),
        hub=hub,
        **{name: getattr(island, name) for name in names},
    )


def connect(
    config: RunConfig, ranks: RankGroup, event_loop: EventLoop, settings: NetworkSettings
) -> Network:
    """Open the rank's connections to other islands.

    The leader checks that they run the same config. The leader opens first, then the first rank of
    each other node, then the other ranks, which may share the connections of the first ones.
    """
    first = find_first_of_node(ranks)
    my_turn = "leader" if ranks.is_leader else "first of node" if first == ranks.rank else "others"
    network = None
    daemon_address = None
    for turn in ("leader", "first of node", "others"):
        if turn == my_turn:
            network = event_loop.run(
                open_network(
                    config.outer.transport, replace(settings, daemon_address=daemon_address)
                )
            )
        daemon_address = ranks.gather(network.daemon_address if network else None)[first]
    assert network is not None
    if network.membership is not None:
        with suppress(DifferingConfigsError):  # `publish_config` warns of it
            check_same_run(config, event_loop.run(network.membership.read_config()))
        event_loop.run(network.membership.publish_config(swarm_text(config)))
    return network


def find_first_of_node(ranks: RankGroup) -> int:
    """Return the first rank on this rank's node. Every rank of the island calls it together."""
    # Host names may be equal, so the rank with number 0 on the node is part of the key: launchers
    # number a node's ranks consecutively.
    node = socket.gethostname(), ranks.rank - int(os.environ.get("LOCAL_RANK", ranks.rank))
    return ranks.gather(node).index(node)


JOIN_FETCHES = "use the run's own (`diloco join ADDRESS` fetches it)"
"""What helps an island of `diloco train`. A loop of one's own has its config in its code."""


def check_same_run(ours: RunConfig, theirs: str | None) -> None:
    """Raise ConfigError, naming the keys, if the swarm's config of this run differs from ours.

    `theirs` is None if the swarm has none.
    """
    if theirs is None:
        return
    run = parse_swarm_config(theirs)
    if run.hash != ours.hash:
        differences = "\n".join(f"  {line}" for line in differing_keys(ours, run))
        same = "give all islands the same model and config" if ours.params else JOIN_FETCHES
        raise ConfigError(
            f"the swarm's run {ours.name!r} has another config than this island:\n{differences}\n"
            f"{same}, or give this run another name"
        )
    for path in find_other_code(ours, run):
        log.warning(
            "the file of %s differs from the file of the island that connected last: compare their "
            "results",
            path,
        )


def close_network(network: Network, event_loop: EventLoop) -> None:
    """Free the sockets and processes of a rank."""
    try:
        event_loop.run(network.close(), timeout_seconds=CLOSE_SECONDS)
    except TimeoutError:
        log.warning("the network did not close within %.0f s", CLOSE_SECONDS)
