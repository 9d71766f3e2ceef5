"""`diloco simulate --in-process`: all islands of a run as threads of one child process, which runs
threads.py.

This is for research on algorithms: many islands run on a small machine and compute bit for bit the
same as real processes. A round therefore never continues without an island: the quorum is all
islands, however long an island waits for a processor. This module does not import torch.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from diloco.config.schema import Config, IslandConfig
from diloco.errors import ConfigError
from diloco.runtime.processes import Child, start
from diloco.simulate.dashboard import Dashboard, print_failure

LOG = "islands.txt"
"""File in the run's folder that holds the child's output."""
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Setting of glibc. Without it, glibc keeps each thread's memory of a step, which doubles the
memory of 4 islands."""
POLL_SECONDS = 0.05


def configure_in_process(config: Config, *, has_disturbances: bool) -> Config:
    """Return the config adapted to one process. Raises ConfigError that lists all settings that
    need separate processes.

    `has_disturbances`: whether faults, namespaces or links are requested.
    """
    problems = list(find_unsupported(config, has_disturbances=has_disturbances))
    if problems:
        raise ConfigError("--in-process:\n" + "\n".join(f"  {line}" for line in problems))
    changes = {"transport": "loopback"}
    if config.outer.gossip is None:
        changes |= {"quorum": len(config.islands), "below_quorum": "wait"}
    return config.model_copy(update={"outer": config.outer.model_copy(update=changes)})


def find_unsupported(config: Config, *, has_disturbances: bool) -> Iterator[str]:
    """Yield each setting that is not possible in one process, with its cure."""
    if has_disturbances:
        yield "--fault, --storm, --netns, --nat and --link apply to processes; leave them out"
    if config.outer.local_steps != "fixed":
        yield (
            f"outer.local_steps is {config.outer.local_steps!r}, which depends on the speed of "
            "each island's machine; "
            "here all islands share one: use fixed, without outer.round_seconds"
        )
    if config.outer.wait_for == "quorum":
        yield (
            "outer.wait_for is 'quorum', so which islands a round waits for depends on their "
            "speed; use all"
        )
    islands = [config.for_island(index) for index in range(len(config.islands))]
    by_island = (list(find_unsupported_in_island(island, islands[0])) for island in islands)
    # Only the first island with problems is reported, because others are likely to have the same.
    yield from next(filter(None, by_island), [])


def find_unsupported_in_island(island: IslandConfig, first: IslandConfig) -> Iterator[str]:
    """Yield each setting of one island that is not possible. `first` is the config of the first
    island.
    """
    name = island.label
    if island.ranks > 1:
        yield f"{name}: island.ranks is {island.ranks}; here an island has one rank: give --ranks 1"
    if island.faults:
        yield f"{name}: island.faults apply to processes; leave them out"
    if island.device != first.device:
        yield (
            f"{name}: island.device is {island.device!r}, {first.label} has {first.device!r}; "
            "use one device"
        )
    if island.profile.steps is not None:
        yield (
            f"{name}: island.profile.steps is set, but a profile covers a whole process; set "
            "steps to null"
        )
    if island.wandb != "off":
        yield (
            f"{name}: island.wandb is {island.wandb!r}, but wandb allows one run per process; "
            "use island.tensorboard"
        )


def run_in_process(config: Config, run_dir: Path, started: list[Child], console: Console) -> bool:
    """Start the child process and show the run until it is over. Return whether the islands
    finished it.
    """
    command = [sys.executable, "-m", "diloco", "islands", str(run_dir / "config.yaml")]
    # The command line takes precedence over a run_dir in the entry of an island.
    child = start(
        "the islands", [*command, f"island.run_dir={run_dir.parent}"], run_dir / LOG, ONE_ARENA
    )
    started.append(child)
    names = [config.for_island(index).label for index in range(len(config.islands))]
    with Dashboard(run_dir, names, config.total_steps, console) as dashboard:
        while child.exit_code is None:
            dashboard.update()
            time.sleep(POLL_SECONDS)
    if child.exit_code:
        print_failure(child, console)
    return child.exit_code == 0
