"""The processes of a simulated run: how each is started, and started again."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.bootstrap import PREFIX
from diloco.config import Config, ConfigError, IslandConfig
from diloco.fault_spec import BOOTSTRAP, Fault, Who
from diloco.faults import FOLDER
from diloco.links import Links, connect
from diloco.netns import Namespace, Net
from diloco.processes import Child, kill, start, torchrun

BOOTSTRAP_SECONDS = 60.0
POLL_SECONDS = 0.05


@dataclass
class Fleet:
    """A run's processes. `started` has all that ever were; `join` starts an island that joins, by its index."""

    run_dir: Path
    started: list[Child]
    islands: dict[int, Child] = field(default_factory=dict)
    bootstrap: Child | None = None
    join: Callable[[int], Child] | None = None
    joined: set[int] = field(default_factory=set)
    net: Net | None = None
    links: Links = field(default_factory=Links)
    has_trouble: bool = False
    """Whether faults may be begun in islands while they run."""
    namespaces: dict[Who, Namespace] = field(default_factory=dict)

    def child(self, who: Who) -> Child | None:
        """The process, if it was ever started."""
        return self.bootstrap if isinstance(who, str) else self.islands.get(who)

    def restart(self, who: Who) -> None:
        """Start it again as it was started, with nothing left of its last life."""
        old = self.child(who)
        assert old is not None, f"{who} was never started"
        kill([old])
        if who in self.joined:
            self.add_joiner(who)
            return
        new = start(old.name, old.command, old.log)
        self.started.append(new)
        if isinstance(who, str):
            self.bootstrap = new
        else:
            self.islands[who] = new

    def add_joiner(self, index: int) -> None:
        """Start an island by joining, for the first time or again."""
        assert self.join is not None, "nobody can join this fleet"
        self.joined.add(index)
        self.islands[index] = self.join(index)


def settle(fleet: Fleet, who: Who) -> None:
    """Give the process a namespace and a link of its own, if the fleet has a net."""
    if fleet.net is not None and who not in fleet.namespaces:
        fleet.namespaces[who] = connect(fleet.net, fleet.links.of(who))


def start_island(config: Config, index: int, address: str | None, faults: Sequence[Fault], fleet: Fleet) -> Child:
    """All ranks of one of the config's islands."""
    island, run_dir = config.for_island(index), fleet.run_dir
    arguments = [*own_overrides(island, index, faults, fleet), f"name={run_dir.name}", f"island.index={index}"]
    if address is not None:
        arguments.append(f"island.bootstrap=[{address}]")
    command = torchrun(island.ranks, ["train", str(run_dir / "config.yaml"), *arguments])
    return start_in(fleet, index, island.island, command, run_dir / island.island / "log.txt")


def start_joiner(config: Config, index: int, address: str, faults: Sequence[Fault], fleet: Fleet) -> Child:
    """One more island, like the config's last, by the command that a user would give; or one that was here again."""
    island = config.for_island(len(config.islands) - 1).model_copy(update={"index": index, "name": None})
    folder = fleet.run_dir / island.island
    if (folder / "config.yaml").exists():
        command = torchrun(island.ranks, ["train", str(folder / "config.yaml")])
    else:
        settle(fleet, index)
        command = [sys.executable, "-m", "diloco", "join", address, "--run", fleet.run_dir.name]
        command += ["--ranks", str(island.ranks), f"island.index={index}"]
        command += [*changed_values(island), *own_overrides(island, index, faults, fleet)]
    return start_in(fleet, index, island.island, command, folder / "log.txt")


def changed_values(island: IslandConfig) -> list[str]:
    """The island's own values that are not the defaults, as overrides; not those that the launcher sets."""
    values, defaults = island.model_dump(mode="json"), IslandConfig().model_dump(mode="json")
    ours = {"name", "index", "ranks", "bootstrap", "listen_host", "run_dir", "faults", "joins"}
    names = [name for name in values if name not in ours and values[name] != defaults[name]]
    return [f"island.{name}={json.dumps(values[name])}" for name in names]


def own_overrides(island: IslandConfig, index: int, faults: Sequence[Fault], fleet: Fleet) -> list[str]:
    """Where the island writes and listens, and what it is to inflict on itself."""
    overrides = [f"island.run_dir={fleet.run_dir.parent}"]
    if index in fleet.namespaces:
        overrides.append(f"island.listen_host={fleet.namespaces[index].host}")
    own = [*island.faults, *(str(fault) for fault in faults if fault.is_own and index in fault.who)]
    if own:
        overrides.append(f"island.faults={json.dumps(own)}")
    if fleet.has_trouble:
        # The island looks there, with each payload and step, for faults that are begun later; not without the folder.
        (fleet.run_dir / island.island / FOLDER).mkdir(parents=True, exist_ok=True)
    return overrides


def start_in(fleet: Fleet, who: Who, name: str, command: Sequence[str], log: Path) -> Child:
    """Start it in its namespace, if it has one."""
    if who in fleet.namespaces:
        command = fleet.namespaces[who].command(*command)
    child = start(name, command, log)
    fleet.started.append(child)
    return child


def start_bootstrap(config: Config, run_dir: Path, fleet: Fleet) -> str:
    """The address of a bootstrap process of this run's kind; it can be killed and started again at the same one."""
    kind = "tcp" if config.outer.transport == "gloo" else "dht"
    host = fleet.namespaces[BOOTSTRAP].host if fleet.net else config.island.listen_host
    command = [sys.executable, "-m", "diloco", "bootstrap", "--rendezvous", kind, "--host", host]
    command += ["--identity", str(run_dir / "bootstrap.key")] if kind == "dht" else []
    if kind == "tcp" and config.island.run_key_file is not None:
        command += ["--run-key-file", config.island.run_key_file]
    child = fleet.bootstrap = start_in(fleet, BOOTSTRAP, BOOTSTRAP, command, run_dir / "bootstrap.txt")
    deadline = time.monotonic() + BOOTSTRAP_SECONDS
    while time.monotonic() < deadline and child.exit_code is None:
        for line in child.log.read_text(errors="replace").splitlines():
            if line.startswith(PREFIX):
                address = line.removeprefix(PREFIX)
                child.command = (*child.command, "--port", port_of(address))
                return address
        time.sleep(POLL_SECONDS)
    raise ConfigError(f"the bootstrap process gave no address within {BOOTSTRAP_SECONDS:.0f} s:\n{child.log_tail()}")


def port_of(address: str) -> str:
    """The port in tcp://HOST:PORT or /ip4/HOST/tcp/PORT/p2p/PEER."""
    found = re.search(r"(?:/tcp/|:)(\d+)", address)
    assert found is not None, f"{address} has a port"
    return found[1]
