"""`diloco doctor`: finds out why islands on different machines cannot find, reach or trust each
other.

It connects to the swarm as an island here would, but announces no record, so the swarm does not
count it as an island.
"""

import asyncio
import shutil
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import typer

from diloco.config.from_swarm import parse_swarm_config
from diloco.config.init_weights import pin_weights_hash
from diloco.config.overrides import differing_keys
from diloco.config.own_code import load_own_config
from diloco.config.schema import RunConfig, parse_config
from diloco.doctor.address_checks import time_connection
from diloco.doctor.checks import Check
from diloco.doctor.host_memory_check import check_host_memory
from diloco.doctor.island_checks import CallbackListener, RemoteIsland, check_remote_island
from diloco.doctor.machine_checks import check_machine
from diloco.doctor.strict_checks import check_strict
from diloco.errors import ConfigError
from diloco.formatting import one_line
from diloco.swarm.visit import (
    LocalIsland,
    find_members,
    find_runs_at,
    host_of,
    open_probe_network,
    open_run_network,
    resolve_local_island,
)
from outer.connect.settings import Network
from outer.errors import InputError, OuterError, is_about_run_key
from outer.membership.base import Member
from outer.membership.records import RunInfo
from outer.routes.addresses import is_loopback

COLORS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "FAILED": typer.colors.RED}
NAME_WIDTH = 18

Line = Check | str
"""The result of a check, or a heading for the checks that follow."""


def doctor(
    arguments: Sequence[str],
    config_path: Path | None,
    run_name: str | None,
    *,
    is_strict: bool = False,
) -> int:
    """Run and print all checks. Return 1 if a check failed, else 0.

    `arguments` are at most one address, and overrides. `is_strict`: also check that the settings
    protect the run from its own members.
    """
    addresses = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if len(addresses) > 1:
        raise ConfigError(
            f"got {addresses[1]!r}; a doctor visits one address, and an override is "
            "section.key=value"
        )
    if is_strict and config_path is None:
        raise ConfigError("--strict checks the settings of a config; add --config FILE")
    address = addresses[0] if addresses else None
    levels = asyncio.run(
        _print_all(diagnose(address, overrides, config_path, run_name, is_strict=is_strict))
    )
    failed = levels.count("FAILED")
    warned = levels.count("warning")
    typer.echo(
        f"\n{failed} FAILED, {warned} {'warning' if warned == 1 else 'warnings'}, "
        f"{levels.count('ok')} ok"
    )
    return 1 if failed else 0


async def _print_all(lines: AsyncIterator[Line]) -> list[str]:
    """Print each line as soon as it is known, and return the levels of the checks."""
    levels = []
    async for line in lines:
        if isinstance(line, Check):
            levels.append(line.level)
        _print_line(line)
    return levels


def _print_line(line: Line) -> None:
    if isinstance(line, str):
        typer.secho(f"\n{line}", bold=True)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 16
    margin = " " * (10 + NAME_WIDTH + 1)
    # Addresses and overrides are never broken, so that they can be copied.
    text = textwrap.fill(
        one_line(line.text), width, initial_indent=margin, subsequent_indent=margin,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    level = typer.style(f"{line.level:<8}", fg=COLORS[line.level])
    typer.echo(f"  {level}{line.name:<{NAME_WIDTH}} {text.lstrip()}")


async def diagnose(
    address: str | None,
    overrides: Sequence[str] = (),
    config_path: Path | None = None,
    run_name: str | None = None,
    *,
    is_strict: bool = False,
) -> AsyncIterator[Line]:
    """Check this machine, then the swarm at `address`, its runs, and each of their islands.

    `is_strict`: also check that the config's settings protect the run from its own members.
    """
    yield "This machine"
    try:
        config = (
            pin_weights_hash(load_own_config(config_path, overrides))
            if config_path is not None
            else None
        )
        local = resolve_local_island(config, parse_config("", overrides), address)
    except ConfigError as error:
        yield Check("FAILED", "config", str(error))
        return
    swarm_host = host_of(address) if address is not None else None
    for check in check_machine(
        local, is_alone=swarm_host is not None and is_loopback(swarm_host[0])
    ):
        yield check
    yield check_host_memory(local)
    if is_strict and local.run is not None:
        yield "A strict run"
        for check in check_strict(local, local.run):
            yield check
    if address is not None:
        yield f"The swarm at {address}"
        async for line in check_swarm(local, address, run_name):
            yield line


async def check_swarm(
    local: LocalIsland, address: str, run_name: str | None
) -> AsyncIterator[Line]:
    """Check the connection to the swarm, then one run or all of its runs.

    The run is the one given by --run, or else the config's; without either, all runs are checked.
    """
    if local.island.proxy is None:  # Through a proxy, the next check tells more.
        connected = await check_address(address)
        yield connected
        if connected.level == "FAILED":
            return
    began = time.monotonic()
    try:
        runs = await find_runs_at(local, address, run_name)
    except (InputError, OuterError) as error:
        yield Check("FAILED", "run key" if is_about_run_key(str(error)) else "swarm", str(error))
        return
    found = ", ".join(
        f"{name} with {len(info.islands)} live islands" for name, info in sorted(runs.items())
    )
    if found:
        yield Check("ok", "runs", f"{found}; the answer took {time.monotonic() - began:.1f} s")
    else:
        yield Check(
            "warning", "runs", "none; start an island with this address in island.bootstrap"
        )
    names = [local.run.name] if runs and local.run is not None else sorted(runs)
    for name in names if run_name is None else [run_name]:
        yield f"Run {name}"
        if name in runs:
            async for line in check_swarm_run(local, address, name, runs[name]):
                yield line
        else:
            text = f"no run {name!r} in this swarm; runs there: {', '.join(sorted(runs)) or 'none'}"
            level = "FAILED" if run_name else "warning"
            yield Check(
                level,
                "run",
                f"{text}; choose one with --run NAME, or start this one with `diloco train`",
            )


async def check_address(address: str) -> Check:
    """Check that something listens at the address."""
    target = host_of(address)
    if target is None:
        return Check("ok", "address", "it has no TCP port, so it is not checked separately")
    where = f"{target[0]} port {target[1]}"
    (seconds, problem) = await time_connection(*target)
    if problem:
        cure = (
            "check that `diloco bootstrap` or an island runs there, and that its firewall lets "
            "this port in"
        )
        return Check("FAILED", "address", f"{where}: {problem}; {cure}")
    return Check("ok", "address", f"{where} accepted a connection in {1000 * seconds:.1f} ms")


async def check_swarm_run(
    local: LocalIsland, address: str, name: str, info: RunInfo
) -> AsyncIterator[Line]:
    """Check a run's config and its live islands."""
    try:
        run = parse_swarm_config(info.config_text)
    except ConfigError as error:
        yield Check("FAILED", "config", f"{error}; does the swarm run another version of diloco?")
        return
    yield compare_configs(local.run, run)
    if not info.islands:
        yield Check("warning", "islands", "none is alive: start one, or wait for one to return")
        return
    try:
        async with open_run_network(local, address, run, info) as network:
            members = await find_members(network, info)
            yield compare_states(members)
            async for line in check_islands(local, address, run, network, members):
                yield line
    except (InputError, OuterError) as error:
        yield Check("FAILED", "network", str(error))


def compare_configs(ours: RunConfig | None, theirs: RunConfig) -> Check:
    """Check that an island with this config could join the run."""
    if ours is None:
        return Check("ok", "config", f"hash {theirs.hash}; `diloco join` takes it from the swarm")
    if ours.hash == theirs.hash:
        return Check("ok", "config", f"hash {theirs.hash}, the same as here")
    keys = ", ".join(differing_keys(ours, theirs))
    return Check(
        "FAILED",
        "config",
        f"it differs in {keys}; use the run's config (`diloco join`), or another run name",
    )


def compare_states(members: Mapping[str, Member]) -> Check:
    """Check that all islands in the same round have the same state."""
    states = [
        f"{m.island} in round {m.round} with state {m.digest[:8] or 'none yet'}"
        for m in members.values()
    ]
    found = {(member.round, member.digest) for member in members.values() if member.digest}
    if len(found) > len({number for number, _ in found}):
        cure = "the islands repair this themselves in a round in which they all reach each other"
        return Check(
            "warning", "islands", f"{', '.join(states)}: states of one round differ; {cure}"
        )
    return Check(
        "ok", "islands", ", ".join(states) or "their records have expired: run the doctor again"
    )


async def check_islands(
    local: LocalIsland,
    address: str,
    run: RunConfig,
    network: Network,
    members: Mapping[str, Member],
) -> AsyncIterator[Line]:
    """Check the islands one after another, so that the measurements do not disturb each other."""
    async with AsyncExitStack() as stack:
        callback = None
        try:
            callback = CallbackListener(
                await stack.enter_async_context(open_listener(local, address, run))
            )
        except InputError as error:
            yield Check(
                "FAILED", "call back", f"this machine cannot listen as an island would: {error}"
            )
        for member in members.values():
            yield f"Island {member.island} of run {run.name}"
            async for check in check_remote_island(
                RemoteIsland(member, run, network.messenger, local, callback)
            ):
                yield check


def open_listener(
    local: LocalIsland, address: str, run: RunConfig
) -> AbstractAsyncContextManager[Network]:
    """Open a network that listens as an island on this machine would."""
    island = local.island
    # With hivemind the listener joins no swarm: a peer connected to it could call back over that
    # connection, and opening a new one would not be tested.
    needs_swarm = not run.outer.network.has_daemon or island.relay == "client"
    own = island.model_dump(
        include={"listen_host", "listen_port", "announce_host", "relay", "relays", "proxy"}
    )
    return open_probe_network(local, run, bootstrap=[address] if needs_swarm else [], **own)
