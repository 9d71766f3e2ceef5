"""`diloco join ADDRESS`: starts an island of a run, given nothing but an address."""

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import typer

from diloco.config.check import check_island, check_network
from diloco.config.from_swarm import check_places, describe_data, parse_swarm_config
from diloco.config.overrides import differing_keys
from diloco.config.schema import Config, dump_config, load_config, parse_config
from diloco.errors import ConfigError
from diloco.runtime.devices.choice import check_device
from diloco.runtime.processes import become_island
from diloco.watchdog.life_signs import life_signs
from inner.files import make_folder, write_atomically

CONNECT_SECONDS = 30.0
MAX_RESTARTS = 3
"""How often the island is restarted under the same name after one of its ranks has died."""


def join(address: str, overrides: list[str], ranks: int, run_name: str | None) -> NoReturn:
    """Replace this process by the launcher of the joining island's ranks."""
    refused = [override for override in overrides if not override.startswith("island.")]
    if refused:
        raise ConfigError(
            f"got {refused[0]!r}; a joiner takes the run's config and may only set island.key=value"
        )
    island = parse_config("", overrides, where="the command line").island
    text, taken = fetch_run_config(address, run_name, island.run_key_file, island.proxy)
    config = build_joiner_config(text, taken, address, [*overrides, f"island.ranks={ranks}"])
    check_island(config.run, config.island, "this island")
    check_network(config.run, config.island)
    check_device(config.island)
    island_dir = config.island.folder(config.name)
    check_folder(island_dir, config)
    make_folder(island_dir, "island.run_dir")
    write_atomically(island_dir / "config.yaml", dump_config(config))
    typer.echo(
        f"joining run {config.name!r} as {config.island.label!r}: {island_dir}; "
        f"{describe_data(config.run)}"
    )
    become_island(config.island.ranks, ["train", str(island_dir / "config.yaml")], MAX_RESTARTS)


def build_joiner_config(text: str, taken: set[str], address: str, overrides: list[str]) -> Config:
    """Return the run's config with the settings of this island.

    The island's default name is the first free island-<k>. Raises ConfigError if the text sets
    anything of an island or names files that this island would read.
    """
    run = parse_swarm_config(text)
    index = next(k for k in range(len(taken) + 1) if f"island-{k}" not in taken)
    own = [
        f"island.bootstrap=[{address}]",
        f"island.index={index}",
        "island.joins=true",
        *overrides,
    ]
    config = parse_config(dump_config(run), own, where="this island's config")
    if config.island.label in taken:
        raise ConfigError(
            f"island.name: {config.island.label!r} is in the run already; names there: "
            f"{sorted(taken)}"
        )
    check_places(config.run, config.island)
    return config


def check_folder(island_dir: Path, config: Config) -> None:
    """Raise ConfigError if the island's folder belongs to another run.

    The island would take that run's checkpoints and names.
    """
    path = island_dir / "config.yaml"
    if not path.exists():
        return
    try:
        earlier = load_config(path).run
    except ConfigError as error:
        raise ConfigError(f"island.run_dir: {error}; move {str(island_dir)!r} away") from None
    if earlier.hash == config.run.hash:
        return
    differences = "\n".join(f"  {line}" for line in differing_keys(earlier, config.run))
    raise ConfigError(
        f"island.run_dir: {str(island_dir)!r} belongs to another run named "
        f"{config.name!r}:\n{differences}\nmove the folder away, or choose another island.run_dir "
        "or island.name"
    )


def fetch_run_config(
    address: str, run_name: str | None, run_key_file: str | None, proxy: str | None = None
) -> tuple[str, set[str]]:
    """Fetch the config text of a run and the names of its islands from the swarm at `address`.
    Raises ConfigError.
    """
    from diloco.swarm.visit import choose_run
    from outer.connect.meeting import find_runs
    from outer.membership.records import RunInfo
    from outer.network.event_loop import EventLoopThread
    from outer.network.run_key import load_run_key

    key = load_run_key(run_key_file)
    loop = EventLoopThread()

    async def find() -> Mapping[str, RunInfo]:
        with life_signs(f"waiting for an answer of {address}, for at most {CONNECT_SECONDS:g} s"):
            return await find_runs(address, CONNECT_SECONDS, key, proxy, run_name)

    try:
        runs = loop.run(find())
    finally:
        loop.close()
    run = choose_run(runs, run_name, address)
    if not run.islands:
        name = run_name or next(iter(runs))
        raise ConfigError(
            f"run {name!r} is known at {address}, but none of its islands is alive, so none can "
            "provide the state; to start the run again, start an island with `diloco train`"
        )
    return run.config_text, set(run.islands)
