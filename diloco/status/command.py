"""`diloco status`: the state of each island of a run, by its own answer or from a folder."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from diloco.errors import ConfigError
from diloco.overview.since import parse_since
from diloco.status.run_status import RunStatus
from diloco.status.table import format_run
from diloco.swarm.visit import host_of


def status(
    target: str,
    overrides: Sequence[str],
    run_name: str | None,
    *,
    as_json: bool,
    since: str | None = None,
) -> int:
    """Print the state of the runs at an address, or of the run in a folder. Returns 1 if an island
    is silent, else 0.

    Raises ConfigError or InputError if there is no run.
    """
    runs = find_status(target, overrides, run_name, since)
    if as_json:
        typer.echo(json.dumps([run.to_json() for run in runs], indent=1, allow_nan=False))
    else:
        typer.echo("\n\n".join("\n".join(format_run(run)) for run in runs))
    return 1 if any(island.figures is None for run in runs for island in run.islands) else 0


def find_status(
    target: str, overrides: Sequence[str], run_name: str | None, since: str | None = None
) -> list[RunStatus]:
    """Read the status from a folder, or request it from the islands at an address.

    `since`: the time from which on incidents in a folder are told, as `parse_since` reads it.
    """
    begin = 0.0 if since is None else parse_since(since, time.time())
    if host_of(target) is not None and not Path(target).is_dir():
        from diloco.status.swarm import ask_swarm

        if since is not None:
            raise ConfigError(
                f"got --since {since}, which is for the folder of a run: leave it out"
            )
        return asyncio.run(ask_swarm(target, overrides, run_name))
    from diloco.status.folder import read_folder

    if overrides or run_name is not None:
        given = overrides[0] if overrides else f"--run {run_name}"
        raise ConfigError(
            f"got {given}, which is for an address; {target!r} is the folder of one run: leave it "
            "out"
        )
    if not Path(target).is_dir():
        raise ConfigError(
            f"got {target!r}, which is neither the folder of a run (runs/quickstart) nor an "
            "address that `diloco bootstrap` prints (tcp://HOST:PORT or "
            "/ip4/HOST/tcp/PORT/p2p/ID)"
        )
    return [read_folder(Path(target), begin)]
