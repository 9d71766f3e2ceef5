"""`diloco join ADDRESS`: from an address alone to a training island."""

import os
import sys
from pathlib import Path

from diloco.check import check_island
from diloco.config import Config, ConfigError, dump_config, parse_config
from diloco.processes import torchrun
from diloco.runfiles import write_atomically

CONNECT_SECONDS = 30.0
MAX_RESTARTS = 3
"""Times that an island is started again, as the same one, when a rank of it has died."""


def join(address: str, overrides: list[str], ranks: int, run_name: str | None) -> int:
    """Replace this process by torchrun, which trains the joined island."""
    refused = [override for override in overrides if not override.startswith("island.")]
    if refused:
        raise ConfigError(f"got {refused[0]!r}; a joiner takes the run's config and sets island.key=value only")
    text, taken = ask_swarm(address, run_name, key_in(overrides))
    config = joined_config(text, taken, address, [*overrides, f"island.ranks={ranks}"])
    check_island(config.run, config.island, "this island")
    run_dir = Path(config.island.run_dir) / config.name
    island_dir = run_dir / config.island.island
    island_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(island_dir / "config.yaml", dump_config(config))
    sys.stdout.write(f"joining run {config.name!r} as {config.island.island!r}: {island_dir}\n")
    sys.stdout.flush()
    command = torchrun(config.island.ranks, ["train", str(island_dir / "config.yaml")], MAX_RESTARTS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(command[0], command)


def joined_config(text: str, taken: set[str], address: str, overrides: list[str]) -> Config:
    """The run's config with this island's own part; its name is the first island-<k> that is free."""
    index = next(k for k in range(len(taken) + 1) if f"island-{k}" not in taken)
    own = [f"island.bootstrap=[{address}]", f"island.index={index}", "island.joins=true", *overrides]
    config = parse_config(text, own, where="the swarm's config")
    if config.island.island in taken:
        raise ConfigError(f"island.name: {config.island.island!r} is in the run already; names there: {sorted(taken)}")
    return config


def key_in(overrides: list[str]) -> str | None:
    """The file of the run's key, as this island gives it: the run's config is read with it."""
    return parse_config("", overrides, where="the command line").island.run_key_file


def ask_swarm(address: str, run_name: str | None, run_key_file: str | None) -> tuple[str, set[str]]:
    """The config text of the run at `address`, and the names of the islands in it."""
    from outer.keys import run_key_in
    from outer.loop import LoopThread
    from outer.network import visit

    key = run_key_in(run_key_file)
    loop = LoopThread()
    try:
        runs = loop.run(visit(address, CONNECT_SECONDS, key))
    finally:
        loop.close()
    if not runs:
        raise ConfigError(f"no run is known at {address}: start an island of it first, or check the address")
    if run_name is None and len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs are known at {address}: {', '.join(sorted(runs))}; choose with --run NAME")
    name = run_name or next(iter(runs))
    if name not in runs:
        raise ConfigError(f"--run: no run {name!r} at {address}; runs there: {', '.join(sorted(runs))}")
    if not runs[name].islands:
        raise ConfigError(
            f"run {name!r} is known at {address}, but none of its islands is alive: there is nobody to take the state "
            "from; to begin it anew, start an island with `diloco train`"
        )
    return runs[name].config_text, set(runs[name].islands)
