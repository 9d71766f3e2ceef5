"""Visits the islands of a run from a process that is no island: finds their records and calls them.

The visitor announces no record, so the swarm does not count it as an island.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.config.schema import Config, IslandConfig, RunConfig, parse_config
from diloco.errors import ConfigError
from diloco.watchdog.life_signs import life_signs
from outer.config import NETWORKS, NetworkFacts
from outer.connect.meeting import find_runs
from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.errors import DeadlineError, InputError, first_line
from outer.identity.island_key import KEY_FILE, IslandKey, load_island_key
from outer.identity.known_names import guest_name
from outer.membership.base import Member
from outer.membership.records import RunInfo
from outer.network.run_key import RunKey, load_run_key

CONNECT_SECONDS = 10.0
"""Longest wait for a swarm that does not answer."""
RECORDS_SECONDS = 5.0
"""Longest wait for the records of the islands that the swarm has listed."""
CLOSE_SECONDS = 0.05
"""Time in which handlers of accepted connections notice the end.

asyncio logs an error for each task that it must cancel.
"""
MULTIADDRESS = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)(?:/|$)")
RENDEZVOUS = re.compile(r"tcp://(.+):([0-9]+)")


@dataclass(frozen=True)
class LocalIsland:
    """The island that the user wants to run on this machine. `run` is None if no config file is
    given.
    """

    run: RunConfig | None
    island: IslandConfig
    transport: str

    @property
    def folder(self) -> Path:
        return self.island.runs

    @property
    def network(self) -> NetworkFacts:
        """The facts of the network by which the island reaches the others."""
        return NETWORKS[self.transport]

    @property
    def connect_seconds(self) -> float:
        return min(CONNECT_SECONDS, self.island.connect_seconds)


def resolve_local_island(
    config: Config | None, overrides_only: Config, address: str | None
) -> LocalIsland:
    """Return the island of the config file, or else of the overrides and the kind of address."""
    if config is not None:
        return LocalIsland(
            config.run, config.for_island(config.island.index), config.outer.transport
        )
    island = overrides_only.for_island(overrides_only.island.index)
    is_tcp = address is not None and address.startswith("tcp://")
    return LocalIsland(None, island, "gloo" if is_tcp else "hivemind")


def resolve_visitor(overrides: Sequence[str], address: str) -> LocalIsland:
    """Return the island of a command without a config file. Raises ConfigError for other settings
    than an island's.
    """
    if refused := [override for override in overrides if not override.startswith("island.")]:
        raise ConfigError(
            f"got {refused[0]!r}; a visitor has no run of its own and may only set island.key=value"
        )
    return resolve_local_island(
        None, parse_config("", overrides, where="the command line"), address
    )


def host_of(address: str) -> tuple[str, int] | None:
    """Return the host and TCP port of a swarm's address; None if the address has no TCP port."""
    found = MULTIADDRESS.match(address) or RENDEZVOUS.fullmatch(address)
    return (found[1].strip("[]"), int(found[2])) if found else None


def open_run_network(
    local: LocalIsland, address: str, run: RunConfig, info: RunInfo
) -> AbstractAsyncContextManager[Network]:
    """Open a network that can call the run's islands. It announces no record and no island calls
    it.
    """
    island = local.island
    folder = local.folder / run.name / local.island.label
    own = {}
    # Islands with an allow list know this machine by its island's keys. A key of libp2p serves only
    # one process at a time.
    if island.allow and (folder / KEY_FILE).exists():
        own["island_key"] = load_island_key(folder / KEY_FILE)
    if island.allow and (folder / "identity.key").exists() and island.label not in info.islands:
        own["identity_path"] = folder / "identity.key"
    return open_probe_network(local, run, bootstrap=[address], proxy=island.proxy, **own)


@asynccontextmanager
async def open_probe_network(
    local: LocalIsland, run: RunConfig, **own: Any
) -> AsyncIterator[Network]:
    """Open a network and close it on exit. `own`: NetworkSettings of this network alone."""
    key = own.pop("island_key", None) or IslandKey.generate()
    run_key = load_usable_key(local.island)
    shared = {
        "connect_seconds": local.connect_seconds,
        "run_key": run_key,
        "allow": local.island.allow,
    }
    guest = NetworkSettings(run.name, guest_name(key.public), 0, island_key=key, **shared, **own)
    network = await open_network(run.outer.transport, guest)
    try:
        yield network
    finally:
        await network.close()
        await asyncio.sleep(CLOSE_SECONDS)


def load_usable_key(island: IslandConfig) -> RunKey | None:
    """Return the island's run key.

    None if there is none or it is unreadable, which the doctor reports.
    """
    try:
        return load_run_key(island.run_key_file)
    except InputError:
        return None


async def find_runs_at(
    local: LocalIsland, address: str, run_name: str | None
) -> Mapping[str, RunInfo]:
    """Return the runs at an address by name, or only the named one. Raises InputError or
    OuterError.
    """
    key = load_usable_key(local.island)
    with life_signs(f"waiting for an answer of {address}, for at most {local.connect_seconds:g} s"):
        return await find_runs(address, local.connect_seconds, key, local.island.proxy, run_name)


async def find_members(network: Network, info: RunInfo) -> Mapping[str, Member]:
    """Return the records of the listed islands, as far as they arrive within RECORDS_SECONDS."""
    assert network.membership is not None, "rank 0 has a membership"
    deadline = time.monotonic() + RECORDS_SECONDS
    members = await network.membership.members()
    while not set(info.islands) <= set(members) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        members = await network.membership.members()
    return members


def choose_run(runs: Mapping[str, RunInfo], name: str | None, address: str) -> RunInfo:
    """Return the run of this name at an address; without a name the only one there.

    Raises ConfigError.
    """
    names = ", ".join(sorted(runs))
    if not runs:
        raise ConfigError(
            f"no run is known at {address}: start an island of it first, or check the address"
        )
    if name is None and len(runs) > 1:
        raise ConfigError(
            f"{len(runs)} runs are known at {address}: {names}; choose with --run NAME"
        )
    if (chosen := name or next(iter(runs))) not in runs:
        raise ConfigError(f"--run: no run {chosen!r} at {address}; runs there: {names}")
    return runs[chosen]


def describe_silence(error: BaseException, seconds: float) -> str:
    """Return why an island has not answered a call within `seconds`."""
    return (
        f"no answer within {seconds:g} s" if isinstance(error, DeadlineError) else first_line(error)
    )
