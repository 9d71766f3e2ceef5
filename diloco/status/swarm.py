"""Requests the state of all islands of a run, from any machine."""

import asyncio
import time
from collections.abc import Sequence

from diloco.config.from_swarm import parse_swarm_config
from diloco.config.schema import RunConfig
from diloco.doctor.path_checks import describe_route, find_route
from diloco.errors import ConfigError
from diloco.formatting import human_seconds, one_line
from diloco.records.run_folder import natural_key
from diloco.status.reply import CALL, IslandStatus, read_figures
from diloco.status.run_status import RunStatus, SeenIsland
from diloco.swarm.visit import (
    RECORDS_SECONDS,
    LocalIsland,
    describe_silence,
    find_members,
    find_runs_at,
    open_run_network,
    resolve_visitor,
)
from diloco.watchdog.life_signs import life_signs
from outer.connect.settings import Network
from outer.errors import MessageError, OuterError, first_line
from outer.membership.base import Member
from outer.membership.records import RunInfo
from outer.network.messages import call_message
from outer.routes.addresses import parse_island_address
from outer.routes.dialer import Dialer
from outer.routes.proxy import parse_proxy

CALL_SECONDS = 5.0


async def ask_swarm(
    address: str, overrides: Sequence[str], run_name: str | None
) -> list[RunStatus]:
    """Return the state of the runs at an address, or only of the named run.

    `overrides` are settings of an island on this machine. Raises ConfigError or InputError if there
    is no such run or the swarm cannot be reached.
    """
    local = resolve_visitor(overrides, address)
    runs = await find_runs_at(local, address, run_name)
    if run_name is not None and run_name not in runs:
        raise ConfigError(
            f"--run: no run {run_name!r} at {address}; runs there: "
            f"{', '.join(sorted(runs)) or 'none'}"
        )
    if not runs:
        raise ConfigError(
            f"no run is known at {address}: start an island of it first, or check the address"
        )
    return [
        await ask_run(local, address, name, runs[name])
        for name in sorted(runs)
        if run_name in (None, name)
    ]


async def ask_run(local: LocalIsland, address: str, name: str, info: RunInfo) -> RunStatus:
    """Ask all islands of a run at once. Silent islands delay the result by at most CALL_SECONDS."""
    run = parse_swarm_config(info.config_text)
    seconds = RECORDS_SECONDS + CALL_SECONDS
    with life_signs(f"asking the {len(info.islands)} islands of {name}, for at most {seconds:g} s"):
        islands = await ask_islands(local, address, run, info) if info.islands else []
    return RunStatus(name, address, run.hash, islands, run.total_steps, run.outer.num_rounds)


async def ask_islands(
    local: LocalIsland, address: str, run: RunConfig, info: RunInfo
) -> list[SeenIsland]:
    """Ask the listed islands of a run, and those that have records, at once."""
    async with open_run_network(local, address, run, info) as network:
        members = await find_members(network, info)
        names = sorted({*info.islands, *members}, key=natural_key)
        asked = [ask_island(local, run, network, each, members.get(each)) for each in names]
        return list(await asyncio.gather(*asked))


async def ask_island(
    local: LocalIsland, run: RunConfig, network: Network, name: str, member: Member | None
) -> SeenIsland:
    """Ask one island for its status."""
    if member is None:
        return SeenIsland(name=name, state="its record has not arrived: ask again")
    record = {"round": member.round, "digest": member.digest}
    try:
        status = await ask_status(network, member)
    except OuterError as error:
        return SeenIsland(
            name=name, state=f"{explain_silence(error)}; `diloco doctor` says more", **record
        )
    state = f"{one_line(status.doing)} for {human_seconds(status.doing_seconds)}"
    path = await find_path(local, run, member.control_addresses[0])
    figures = read_figures(status, time.time())
    return SeenIsland(name=name, state=state, figures=figures, status=status, path=path, **record)


async def ask_status(network: Network, member: Member) -> IslandStatus:
    """Return the island's status. Raises OuterError."""
    address = member.control_addresses[0]
    return await call_message(
        network.messenger, address, CALL, None, IslandStatus, timeout_seconds=CALL_SECONDS
    )


def explain_silence(error: OuterError) -> str:
    """Return why an island has not answered."""
    if isinstance(error, MessageError):
        return f"runs another version of diloco: {first_line(error)}"
    return describe_silence(error, CALL_SECONDS)


async def find_path(local: LocalIsland, run: RunConfig, address: str) -> str:
    """Return the route by which rank 0 at this address is reached from here."""
    network = run.outer.network
    if network.has_daemon:
        return "libp2p"
    if not network.has_routes:
        return f"direct {address}"
    try:
        route, failed = await find_route(
            Dialer(parse_proxy(local.island.proxy)), parse_island_address(address)
        )
    except MessageError as error:
        return f"unknown: {first_line(error)}"
    return f"none: {'; '.join(failed)}" if route is None else describe_route(route)
