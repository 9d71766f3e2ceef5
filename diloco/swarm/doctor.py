"""`diloco doctor`: what keeps islands on different machines from finding, reaching and trusting each other.

It knocks at the swarm as an island here would, yet announces no record: nobody counts it as an island.
"""

import asyncio
import re
import secrets
import shutil
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import typer

from diloco.checkup import Check, Subject, connect_seconds, is_loopback, local_checks, subject_of, usable_key
from diloco.config import ConfigError, RunConfig, differing_keys, load_config, parse_config
from diloco.examine import Callback, Patient, examine
from diloco.initial import pinned
from diloco.units import one_line
from outer.errors import InputError, OuterError
from outer.membership.base import Member
from outer.membership.records import RunInfo
from outer.network import Network, NetworkSettings, open_network, visit

CONNECT_SECONDS = 10.0
RECORDS_SECONDS = 5.0
"""How long to look for the islands that the swarm spoke of."""
PARTING_SECONDS = 0.05
"""For what was accepted to see that its connection has ended; asyncio speaks ill of tasks that it has to cancel."""
MULTIADDRESS = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)(?:/|$)")
RENDEZVOUS = re.compile(r"tcp://(.+):([0-9]+)")
COLORS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "FAILED": typer.colors.RED}
NAME_WIDTH = 18

Line = Check | str
"""A check, or what those that follow are about."""


def doctor(arguments: Sequence[str], config_path: Path | None, run_name: str | None) -> int:
    """Print all checks; 0 when none has failed, else 1. `arguments`: at most one address, and overrides."""
    addresses = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if len(addresses) > 1:
        raise ConfigError(f"got {addresses[1]!r}; a doctor visits one address, and an override is section.key=value")
    address = addresses[0] if addresses else None
    levels = asyncio.run(_print_all(address, overrides, config_path, run_name))
    failed, warned = levels.count("FAILED"), levels.count("warning")
    typer.echo(f"\n{failed} FAILED, {warned} {'warning' if warned == 1 else 'warnings'}, {levels.count('ok')} ok")
    return 1 if failed else 0


async def _print_all(
    address: str | None, overrides: Sequence[str], config_path: Path | None, run_name: str | None
) -> list[str]:
    """Show each line as soon as it is known; the checks' levels."""
    levels = []
    async for line in diagnose(address, overrides, config_path, run_name):
        if isinstance(line, Check):
            levels.append(line.level)
        _show(line)
    return levels


def _show(line: Line) -> None:
    if isinstance(line, str):
        typer.secho(f"\n{line}", bold=True)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 16
    margin = " " * (10 + NAME_WIDTH + 1)
    # Addresses and overrides are there to be copied: never cut.
    text = textwrap.fill(
        one_line(line.text), width, initial_indent=margin, subsequent_indent=margin,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    level = typer.style(f"{line.level:<8}", fg=COLORS[line.level])
    typer.echo(f"  {level}{line.name:<{NAME_WIDTH}} {text.lstrip()}")


async def diagnose(
    address: str | None, overrides: Sequence[str] = (), config_path: Path | None = None, run_name: str | None = None
) -> AsyncIterator[Line]:
    """This machine, then the swarm at `address`, its runs, and each of their islands."""
    yield "This machine"
    try:
        config = pinned(load_config(config_path, overrides)) if config_path is not None else None
        subject = subject_of(config, parse_config("", overrides), address)
    except ConfigError as error:
        yield Check("FAILED", "config", str(error))
        return
    at = host_of(address) if address is not None else None
    for check in local_checks(subject, is_alone=at is not None and is_loopback(at[0])):
        yield check
    if address is not None:
        yield f"The swarm at {address}"
        async for line in swarm_checks(subject, address, run_name):
            yield line


async def swarm_checks(subject: Subject, address: str, run_name: str | None) -> AsyncIterator[Line]:
    """The way to the swarm, then each run that is of interest; a step that fails is the last."""
    connected = await check_address(address)
    yield connected
    if connected.level == "FAILED":
        return
    seconds, began = visit_seconds(subject), time.monotonic()
    try:
        runs = await visit(address, seconds, usable_key(subject.island))
    except (InputError, OuterError) as error:
        yield Check("FAILED", "run key" if "run key" in str(error) else "swarm", str(error))
        return
    known = ", ".join(f"{name} with {len(info.islands)} live islands" for name, info in sorted(runs.items()))
    if known:
        yield Check("ok", "runs", f"{known}; told in {time.monotonic() - began:.1f} s")
    else:
        yield Check("warning", "runs", "none; start an island with this address in island.bootstrap")
    for name in chosen_runs(runs, subject, run_name):
        yield f"Run {name}"
        if name in runs:
            async for line in run_checks(subject, address, name, runs[name]):
                yield line
        else:
            text = f"no run {name!r} in this swarm; there: {', '.join(sorted(runs)) or 'none'}"
            level = "FAILED" if run_name else "warning"
            yield Check(level, "run", f"{text}; choose with --run NAME, or begin it with `diloco train`")


def chosen_runs(runs: Mapping[str, RunInfo], subject: Subject, run_name: str | None) -> list[str]:
    """The runs to look at: the one that was named, the config's, or all."""
    if run_name is not None:
        return [run_name]
    if subject.run is not None and runs:
        return [subject.run.name]
    return sorted(runs)


def visit_seconds(subject: Subject) -> float:
    """How long to wait for a swarm that does not answer."""
    return min(CONNECT_SECONDS, subject.island.connect_seconds)


def host_of(address: str) -> tuple[str, int] | None:
    """Host and TCP port of a swarm's address; None when it has none."""
    found = MULTIADDRESS.match(address) or RENDEZVOUS.fullmatch(address)
    return (found[1].strip("[]"), int(found[2])) if found else None


async def check_address(address: str) -> Check:
    """Whether anything listens at the address."""
    at = host_of(address)
    if at is None:
        return Check("ok", "address", "no TCP port in it: not tried on its own")
    seconds, problem = await connect_seconds(*at)
    if problem:
        cure = "check that `diloco bootstrap` or an island runs there, and that its firewall lets this port in"
        return Check("FAILED", "address", f"{at[0]} port {at[1]}: {problem}; {cure}")
    return Check("ok", "address", f"{at[0]} port {at[1]} took a connection in {1000 * seconds:.1f} ms")


async def run_checks(subject: Subject, address: str, name: str, info: RunInfo) -> AsyncIterator[Line]:
    """A run's config and its live islands."""
    try:
        run = parse_config(info.config_text, where="its config").run
    except ConfigError as error:
        yield Check("FAILED", "config", f"{error}; does the swarm run another version of diloco?")
        return
    yield compare_configs(subject.run, run)
    if not info.islands:
        yield Check("warning", "islands", "none is alive: start one, or wait for one to come back")
        return
    try:
        async with entered(subject, address, run, info) as network:
            members = await find_members(network, info)
            yield compare_states(members)
            async for line in island_checks(subject, address, run, network, members):
                yield line
    except (InputError, OuterError) as error:
        yield Check("FAILED", "network", str(error))


def compare_configs(ours: RunConfig | None, theirs: RunConfig) -> Check:
    """Whether an island with this config would be let in."""
    if ours is None:
        return Check("ok", "config", f"hash {theirs.hash}; `diloco join` takes it from the swarm")
    if ours.hash == theirs.hash:
        return Check("ok", "config", f"hash {theirs.hash}, the same as here")
    keys = ", ".join(differing_keys(ours, theirs))
    return Check("FAILED", "config", f"it differs in {keys}; use the run's own (`diloco join`), or another name")


def compare_states(members: Mapping[str, Member]) -> Check:
    """Who is there, and whether all that are in one round hold one state."""
    told = [f"{m.island} in round {m.round} with state {m.digest[:8] or 'none yet'}" for m in members.values()]
    digests: dict[int, set[str]] = {}
    for member in members.values():
        if member.digest:
            digests.setdefault(member.round, set()).add(member.digest)
    if any(len(found) > 1 for found in digests.values()):
        cure = "they heal this themselves in a round in which they all reach each other"
        return Check("warning", "islands", f"{', '.join(told)}: states of one round differ; {cure}")
    return Check("ok", "islands", ", ".join(told) or "their records are gone: ask again")


async def island_checks(
    subject: Subject, address: str, run: RunConfig, network: Network, members: Mapping[str, Member]
) -> AsyncIterator[Line]:
    """Each island in turn, so that none disturbs the measuring of another."""
    async with AsyncExitStack() as stack:
        callback = None
        try:
            callback = Callback(await stack.enter_async_context(opened(run, listener_settings(subject, address, run))))
        except InputError as error:
            yield Check("FAILED", "way back", f"this machine cannot listen as an island would: {error}")
        for member in members.values():
            yield f"Island {member.island} of run {run.name}"
            async for check in examine(Patient(member, run, network.messenger, subject, callback)):
                yield check


def entered(subject: Subject, address: str, run: RunConfig, info: RunInfo) -> AbstractAsyncContextManager[Network]:
    """A network that knows the run's islands and dials them; it announces nothing and is dialled by nobody."""
    island = subject.island
    identity = subject.folder / run.name / island.island / "identity.key"
    # Islands with an allow list know this machine by its island's key, which must not be there twice at a time.
    may_use = bool(island.allow) and identity.exists() and island.island not in info.islands
    settings = settings_of(subject, run, [address])
    return opened(run, replace(settings, identity_path=identity if may_use else None))


def listener_settings(subject: Subject, address: str, run: RunConfig) -> NetworkSettings:
    """Listens as an island here would. Under hivemind it is a peer of its own, which has met nobody: whoever is
    connected already needs no way back."""
    island = subject.island
    needs_swarm = run.outer.transport == "gloo" or island.relay == "client"
    settings = settings_of(subject, run, [address] if needs_swarm else [])
    return replace(
        settings,
        listen_host=island.listen_host,
        listen_port=island.listen_port,
        announce_host=island.announce_host,
        relay=island.relay,
    )


def settings_of(subject: Subject, run: RunConfig, bootstrap: list[str]) -> NetworkSettings:
    """What all of the doctor's networks have in common."""
    return NetworkSettings(
        run_id=run.name,
        island=f"doctor-{secrets.token_hex(4)}",
        rank=0,
        bootstrap=bootstrap,
        connect_seconds=visit_seconds(subject),
        run_key=usable_key(subject.island),
        allow=subject.island.allow,
    )


@asynccontextmanager
async def opened(run: RunConfig, settings: NetworkSettings) -> AsyncIterator[Network]:
    """A network, closed at the end."""
    network = await open_network(run.outer.transport, settings)
    try:
        yield network
    finally:
        await network.close()
        await asyncio.sleep(PARTING_SECONDS)


async def find_members(network: Network, info: RunInfo) -> Mapping[str, Member]:
    """The islands that the swarm spoke of, as far as their records come in time."""
    assert network.membership is not None, "rank 0 has a membership"
    deadline = time.monotonic() + RECORDS_SECONDS
    members = await network.membership.members()
    while not set(info.islands) <= set(members) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        members = await network.membership.members()
    return members
