"""`diloco simulate --in-process`: all islands of a run as threads of one process. No torch here; see turns.py.

For research on algorithms: many islands on a small machine, with the results, bit for bit, that real processes have.
So a round never goes on without an island: the quorum is all of them, however long one has to wait for its turn.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from diloco.config import Config, ConfigError, IslandConfig
from diloco.live import LiveView
from diloco.processes import Child, start

LOG = "islands.txt"
"""In the run's folder: what the process prints."""
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Else glibc keeps the memory of a step for each thread that has made one: twice as much in all, with 4 islands."""
POLL_SECONDS = 0.05


def in_one_process(config: Config, *, has_trouble: bool) -> Config:
    """The config as it runs in one process. Raises ConfigError with all that needs processes of its own.

    `has_trouble`: faults, namespaces or links are asked for.
    """
    found = list(objections(config, has_trouble=has_trouble))
    if found:
        raise ConfigError("--in-process:\n" + "\n".join(f"  {line}" for line in found))
    changes = {"transport": "loopback"}
    if config.outer.gossip is None:
        changes |= {"quorum": len(config.islands), "below_quorum": "wait"}
    return config.model_copy(update={"outer": config.outer.model_copy(update=changes)})


def objections(config: Config, *, has_trouble: bool) -> Iterator[str]:
    """What in the config cannot be had in one process, each with its cure."""
    if has_trouble:
        yield "--fault, --storm, --netns and --link are done to processes; leave them out"
    if config.outer.local_steps != "fixed":
        yield (
            f"outer.local_steps is {config.outer.local_steps!r}, and follows from how fast each island's machine is; "
            "here they share one: use fixed, without outer.round_seconds"
        )
    if config.outer.wait_for == "quorum":
        yield "outer.wait_for is 'quorum', and whom a round waits for follows from each island's speed; use all"
    islands = [config.for_island(index) for index in range(len(config.islands))]
    by_island = (list(island_objections(island, islands[0])) for island in islands)
    yield from next(filter(None, by_island), [])  # Others are likely to have the same.


def island_objections(island: IslandConfig, first: IslandConfig) -> Iterator[str]:
    """What in an island's own config cannot be had; `first` is that of the first island."""
    name = island.island
    if island.ranks > 1:
        yield f"{name}: island.ranks is {island.ranks}; here an island has one rank: give --ranks 1"
    if island.faults:
        yield f"{name}: island.faults are done to processes; leave them out"
    if island.device != first.device:
        yield f"{name}: island.device is {island.device!r}, that of {first.island} {first.device!r}; use one"
    if island.parallel.compile:
        yield f"{name}: island.parallel.compile: torch compiles in one thread at a time; set it to false"
    if island.profile.steps is not None:
        yield f"{name}: island.profile: a profile is of a whole process; set steps to null"
    if island.wandb != "off":
        yield f"{name}: island.wandb is {island.wandb!r}: wandb has one run a process; use island.tensorboard"


def run_in_process(config: Config, run_dir: Path, started: list[Child], console: Console) -> bool:
    """Start the process, show the run until it is over; whether the islands finished it."""
    command = [sys.executable, "-m", "diloco", "islands", str(run_dir / "config.yaml")]
    # By command line, because it wins over what an island says for itself.
    child = start("the islands", [*command, f"island.run_dir={run_dir.parent}"], run_dir / LOG, ONE_ARENA)
    started.append(child)
    names = [config.for_island(index).island for index in range(len(config.islands))]
    with LiveView(run_dir, names, config.total_steps, console) as view:
        while child.exit_code is None:
            view.update()
            time.sleep(POLL_SECONDS)
        view.update()
    if child.exit_code:
        console.print(f"{child.name} ended with status {child.exit_code}; from {child.log}:")
        console.print(child.last_words(), markup=False, highlight=False, soft_wrap=True)
    return child.exit_code == 0
