"""`diloco doctor`: what keeps islands on different machines from finding, reaching and trusting each other.

It knocks at the swarm as an island here would, yet announces no record: nobody counts it as an island.
"""

import asyncio
import logging
import re
import secrets
import shutil
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import typer

from diloco.checkup import Check, Subject, is_loopback, local_checks, state_bytes, subject_of, usable_key
from diloco.config import ConfigError, RunConfig, differing_keys, load_config, parse_config
from diloco.examine import Callback, examine
from diloco.units import one_line
from outer.errors import InputError, OuterError
from outer.membership.base import Member
from outer.membership.records import RunInfo
from outer.network import Network, NetworkSettings, open_network, visit
from outer.probe import Probe

CONNECT_SECONDS = 10.0
DIAL_SECONDS = 5.0
RECORDS_SECONDS = 5.0
"""How long to look for the islands that the swarm spoke of."""
MULTIADDRESS = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)(?:/|$)")
COLORS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "FAILED": typer.colors.RED}
NAME_WIDTH = 18

Line = Check | str
"""A check, or what those that follow are about."""


def doctor(arguments: Sequence[str], config_path: Path | None, run_name: str | None) -> int:
    """Print all checks; 0 when none has failed, else 1. `arguments`: at most one address, and overrides."""
    logging.getLogger("outer").setLevel(logging.CRITICAL)  # what peers refuse is said in the checks
    addresses = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if len(addresses) > 1:
        raise ConfigError(f"got {addresses[1]!r}; a doctor visits one address, and an override is section.key=value")
    address = addresses[0] if addresses else None
    config = load_config(config_path, overrides) if config_path is not None else None
    subject = subject_of(config, parse_config("", overrides), address)
    levels = asyncio.run(_print_all(subject, address, run_name))
    failed, warned = levels.count("FAILED"), levels.count("warning")
    typer.echo(f"\n{failed} FAILED, {warned} warnings, {len(levels) - failed - warned} ok")
    return 1 if failed else 0


async def _print_all(subject: Subject, address: str | None, run_name: str | None) -> list[str]:
    levels = []
    async for line in all_checks(subject, address, run_name):
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


async def all_checks(subject: Subject, address: str | None, run_name: str | None = None) -> AsyncIterator[Line]:
    """This machine, then the swarm at `address`, its runs, and each of their islands."""
    host = host_of(address)[0] if address is not None and host_of(address) else ""
    yield "This machine"
    for check in local_checks(subject, is_alone=is_loopback(host)):
        yield check
    if address is None:
        return
    yield f"The swarm at {address}"
    connected = await check_address(address)
    yield connected
    if connected.level == "FAILED":
        return
    seconds = min(CONNECT_SECONDS, subject.island.connect_seconds)
    began = time.monotonic()
    try:
        runs = await visit(address, seconds, usable_key(subject.island))
    except InputError as error:
        yield Check("FAILED", "run key" if "run key" in str(error) else "swarm", str(error))
        return
    known = ", ".join(f"{name!r} with {len(info.islands)} islands" for name, info in sorted(runs.items())) or "no run"
    yield Check("ok" if runs else "warning", "runs", f"{known}, told in {time.monotonic() - began:.1f} s{'' if runs else NO_RUN}")
    for name in chosen(runs, subject, run_name):
        yield f"Run {name}"
        async for line in run_checks(subject, address, name, runs.get(name)):
            yield line


NO_RUN = "; start an island of it with this address in island.bootstrap, or check that this is the address"


def chosen(runs: dict[str, RunInfo], subject: Subject, run_name: str | None) -> list[str]:
    """The runs to look at: the one that was named, the config's, or all."""
    if run_name is not None:
        return [run_name]
    if subject.run is not None and runs:
        return [subject.run.name]
    return sorted(runs)
