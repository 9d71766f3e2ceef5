"""Start and restart the processes of a simulated run."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.config.from_swarm import own_the_places
from diloco.config.schema import Config, IslandConfig
from diloco.errors import ConfigError
from diloco.faults.self_inflicted import FAULTS_FOLDER
from diloco.faults.spec import BOOTSTRAP, RELAYS, Fault, Service, Target
from diloco.network_emulation.links import Links, attach
from diloco.network_emulation.namespaces import Namespace, Net
from diloco.network_emulation.nat import enclose, masquerade
from diloco.network_emulation.sites import Site, build_site
from diloco.runtime.devices.shares import GpuShares
from diloco.runtime.processes import Child, island_command, kill, start
from diloco.simulate.nodes import NodesOf, nodes_command
from diloco.swarm.bootstrap import PREFIX

BOOTSTRAP_SECONDS = 300.0
"""A hang guard. The first start after an installation reads gigabytes from the disk: it took more
than a minute on a busy machine with CUDA's libraries."""
POLL_SECONDS = 0.05
PROXY_PORT = 3128


@dataclass
class Fleet:
    """The processes of a run. `started`: all processes ever started; `join`: starts a joining
    island by its index.
    """

    run_dir: Path
    started: list[Child]
    islands: dict[int, Child] = field(default_factory=dict)
    services: dict[Service, Child] = field(default_factory=dict)
    """The bootstrap process and the relays."""
    join: Callable[[int], Child] | None = None
    joined: set[int] = field(default_factory=set)
    net: Net | None = None
    links: Links = field(default_factory=Links)
    injects_faults: bool = False
    """Whether running islands accept requests for faults."""
    namespaces: dict[Target, Namespace] = field(default_factory=dict)
    nat: Sequence[int] = ()
    """Islands behind a NAT."""
    num_nodes: int = 1
    """Number of nodes of each island that does not join."""
    sites: dict[Target, Site] = field(default_factory=dict)
    """The emulated network of islands behind a NAT or with several nodes, whose namespaces are
    those of their routers."""
    proxied: Sequence[int] = ()
    """Islands whose only way out is a proxy on their router."""
    relays: tuple[str, ...] = ()
    """Addresses of the relays through which the islands of `hidden` are reached."""
    gpus: GpuShares = field(default_factory=GpuShares)

    @property
    def hidden(self) -> set[int]:
        """Islands that can only be reached through a relay."""
        return {*self.nat, *self.proxied}

    def child(self, target: Target) -> Child | None:
        """Return the target's current process, or None if it was never started."""
        return self.services.get(target) if isinstance(target, str) else self.islands.get(target)

    def restart(self, target: Target) -> None:
        """Start the target again with the same command, after killing all processes of its previous
        life.
        """
        old = self.child(target)
        assert old is not None, f"{target} was never started"
        kill([old])
        if target in self.joined:
            self.add_joiner(target)
            return
        new = start(old.name, old.command, old.log, old.env)
        self.started.append(new)
        if isinstance(target, str):
            self.services[target] = new
        else:
            self.islands[target] = new

    def add_joiner(self, index: int) -> None:
        """Start, or restart, an island that joins the running swarm."""
        assert self.join is not None, "this fleet takes no joiners"
        self.joined.add(index)
        self.islands[index] = self.join(index)


def assign_namespace(fleet: Fleet, target: Target, num_nodes: int = 1) -> None:
    """Give the target its own namespace and link, if the fleet has an emulated network."""
    if fleet.net is None or target in fleet.namespaces:
        return
    router = fleet.namespaces[target] = attach(fleet.net, fleet.links.of(target))
    if num_nodes > 1 or target in fleet.hidden:
        site = fleet.sites[target] = build_site(router, num_nodes)
        if target in fleet.proxied:
            enclose(router)
        elif target in fleet.nat:
            masquerade(router)
        else:
            fleet.net.route(site.network, router)


def start_island(
    config: Config, index: int, address: str | None, faults: Sequence[Fault], fleet: Fleet
) -> Child:
    """Start all ranks of one of the config's islands, on all of its nodes."""
    island = config.for_island(index)
    run_dir = fleet.run_dir
    arguments = [
        *island_overrides(island, index, faults, fleet),
        f"name={run_dir.name}",
        f"island.index={index}",
    ]
    if address is not None:
        arguments.append(f"island.bootstrap=[{address}]")
    train = ["train", str(run_dir / "config.yaml"), *arguments]
    log = run_dir / island.label / "log.txt"
    if fleet.num_nodes == 1:
        return start_child(fleet, index, island.label, island_command(island.ranks, train), log)
    gpus = fleet.gpus.by_island.get(index, ())
    nodes = NodesOf(config, island, fleet.sites[index], gpus, is_hidden=index in fleet.hidden)
    child = start(island.label, nodes_command(nodes, train), log)
    fleet.started.append(child)
    return child


def start_joiner(
    config: Config, index: int, address: str, faults: Sequence[Fault], fleet: Fleet
) -> Child:
    """Start an island with the command `diloco join` and the values of the config's last island, or
    restart it.
    """
    island = config.for_island(len(config.islands) - 1).model_copy(
        update={"index": index, "name": None}
    )
    island = island.model_copy(
        update={"ranks": island.ranks // fleet.num_nodes}
    )  # a joining island has one node
    island = own_the_places(
        config.run, island
    )  # allowed because the run's config is by this machine's operator
    fleet.gpus.give_spare(index, island)
    folder = fleet.run_dir / island.label
    if (folder / "config.yaml").exists():
        command = island_command(island.ranks, ["train", str(folder / "config.yaml")])
    else:
        assign_namespace(fleet, index)
        command = [sys.executable, "-m", "diloco", "join", address, "--run", fleet.run_dir.name]
        command += ["--ranks", str(island.ranks), f"island.index={index}"]
        command += [*changed_values(island), *island_overrides(island, index, faults, fleet)]
    return start_child(fleet, index, island.label, command, folder / "log.txt")


def changed_values(island: IslandConfig) -> list[str]:
    """Return the island's values that differ from the defaults, as overrides, except those that the
    launcher sets.
    """
    values = island.model_dump(mode="json")
    defaults = IslandConfig().model_dump(mode="json")
    set_by_launcher = {
        "name",
        "index",
        "ranks",
        "bootstrap",
        "listen_host",
        "run_dir",
        "faults",
        "joins",
    }
    names = [
        name for name in values if name not in set_by_launcher and values[name] != defaults[name]
    ]
    return [f"island.{name}={json.dumps(values[name])}" for name in names]


def island_overrides(
    island: IslandConfig, index: int, faults: Sequence[Fault], fleet: Fleet
) -> list[str]:
    """Return overrides for where the island writes and listens, and for the faults that it injects
    into itself.
    """
    overrides = [f"island.run_dir={fleet.run_dir.parent}"]
    if index in fleet.hidden:
        overrides.append(f"island.relays=[{','.join(fleet.relays)}]")
        if index in fleet.proxied:
            overrides.append(f"island.proxy=http://{fleet.sites[index].gateway}:{PROXY_PORT}")
    elif index in fleet.namespaces and index not in fleet.sites:
        overrides.append(f"island.listen_host={fleet.namespaces[index].host}")
    if (link := fleet.links.of(index)) is not None and island.link_mbit is None:
        overrides.append(f"island.link_mbit={link.rate / 1e6:g}")
    specs = [
        *island.faults,
        *(str(fault) for fault in faults if fault.is_self_inflicted and index in fault.targets),
    ]
    if specs:
        overrides.append(f"island.faults={json.dumps(specs)}")
    if fleet.injects_faults:
        # Only if this folder exists does the island check for requested faults at each payload and
        # step.
        (fleet.run_dir / island.label / FAULTS_FOLDER).mkdir(parents=True, exist_ok=True)
    return overrides


def start_child(
    fleet: Fleet, target: Target, name: str, command: Sequence[str], log: Path
) -> Child:
    """Start a process in the target's namespace, if it has one, with the target's GPUs."""
    place = fleet.sites[target].nodes[0] if target in fleet.sites else fleet.namespaces.get(target)
    if place is not None:
        command = place.command(*command)
    child = start(name, command, log, fleet.gpus.environment(target))
    fleet.started.append(child)
    return child


def start_bootstrap(config: Config, run_dir: Path, fleet: Fleet) -> str:
    """Start the run's bootstrap process and return its address, which does not change at a
    restart.
    """
    kind = config.outer.network.rendezvous
    host = fleet.namespaces[BOOTSTRAP].host if fleet.net else config.island.listen_host
    command = [sys.executable, "-m", "diloco", "bootstrap", "--rendezvous", kind, "--host", host]
    command += ["--identity", str(run_dir / "bootstrap.key")] if kind == "dht" else []
    command += ["--folder", str(run_dir / "rendezvous")] if kind == "tcp" else []
    if kind == "tcp" and config.island.run_key_file is not None:
        command += ["--run-key-file", config.island.run_key_file]
    child = fleet.services[BOOTSTRAP] = start_child(
        fleet, BOOTSTRAP, BOOTSTRAP, command, empty_log(run_dir / "bootstrap.txt")
    )
    address = wait_for_address(child)
    child.command = (*child.command, "--port", port_of(address))
    return address


def start_relays(config: Config, fleet: Fleet) -> None:
    """Start the relays for the islands in `hidden`, each on its own machine. They keep their ports
    at a restart.
    """
    key = (
        [] if config.island.run_key_file is None else ["--run-key-file", config.island.run_key_file]
    )
    for name in RELAYS:
        assign_namespace(fleet, name)
        command = [
            sys.executable,
            "-m",
            "diloco",
            "relay",
            "--host",
            fleet.namespaces[name].host,
            *key,
        ]
        child = start_child(fleet, name, name, command, empty_log(fleet.run_dir / f"{name}.txt"))
        fleet.services[name] = child
        address = wait_for_address(child)
        child.command = (*child.command, "--port", port_of(address))
        fleet.relays = (*fleet.relays, address)


def start_proxy(fleet: Fleet, index: int) -> None:
    """Start the proxy that is the only way out of an island, on the island's router."""
    words = [
        sys.executable,
        "-m",
        "diloco.network_emulation.proxy",
        fleet.sites[index].gateway,
        str(PROXY_PORT),
    ]
    log = empty_log(fleet.run_dir / f"proxy-{index}.txt")
    fleet.started.append(start(f"proxy-{index}", fleet.namespaces[index].command(*words), log))


def empty_log(path: Path) -> Path:
    """Return the path after emptying the log, so that no address of an earlier start is read from
    it.
    """
    path.unlink(missing_ok=True)
    return path


def wait_for_address(child: Child) -> str:
    """Return the address that a process prints once it serves. Raises ConfigError if it does not
    print it in time.
    """
    deadline = time.monotonic() + BOOTSTRAP_SECONDS
    while time.monotonic() < deadline and child.exit_code is None:
        for line in child.log.read_text(errors="replace").splitlines():
            if line.startswith(PREFIX):
                return line.removeprefix(PREFIX)
        time.sleep(POLL_SECONDS)
    raise ConfigError(
        f"the process {child.name!r} printed no address within {BOOTSTRAP_SECONDS:.0f} s:\n"
        f"{child.log_tail()}"
    )


def port_of(address: str) -> str:
    """Extract the port from tcp://HOST:PORT or /ip4/HOST/tcp/PORT/p2p/PEER."""
    found = re.search(r"(?:/tcp/|:)(\d+)", address)
    assert found is not None, f"{address} has no port"
    return found[1]
