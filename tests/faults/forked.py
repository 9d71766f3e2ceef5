"""Forked islands around a real bootstrap process: cheap to kill and to start again, over either transport."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco import island as life
from diloco.assemble import Parts
from diloco.config import Config, parse_config
from diloco.faults import FOLDER
from diloco.fleet import Fleet, start_bootstrap
from diloco.metrics import RoundRecord, StepRecord
from diloco.processes import stop
from diloco.runfiles import METRICS, Tail
from diloco.train import train
from tests.swarm import TINY, Island, Rank, Swarm, Work, swarm

POLL_SECONDS = 0.01
OVERRIDES = ("outer.rounds=100000", "evaluate.every_rounds=100000", "outer.optimizer.momentum=0.9")
"""These runs are ended from outside."""


@contextmanager
def forked(folder: Path, transport: str, num_islands: int, *overrides: str) -> Iterator[tuple[Swarm, Fleet]]:
    """A swarm without islands yet, and the fleet that starts its bootstrap process again; all is killed at the end."""
    if transport == "hivemind":
        import hivemind  # noqa: F401 - the forked islands inherit it
    fleet = Fleet(folder / "bootstrap", [])
    kind = f"outer.transport={transport}"
    try:
        address = start_bootstrap(parse_config(TINY, [kind]), fleet.run_dir, fleet)
        islands = [{} for _ in range(num_islands)]
        with swarm(folder, kind, *OVERRIDES, *overrides, islands=islands, address=address) as made:
            for index in range(num_islands):
                (folder / made.config.name / f"island-{index}" / FOLDER).mkdir(parents=True)
            yield made, fleet
    finally:
        stop(fleet.started)


def paced(step_seconds: float) -> Work:
    """What `diloco train` does, every inner step made to last so long: the same whatever else the machine does."""

    def live(parts: Parts) -> None:
        slower = parts.slow_down

        def slow_down(seconds: float) -> None:
            time.sleep(max(0.0, step_seconds - seconds))
            slower(max(step_seconds, seconds))

        parts.slow_down = slow_down
        life.run(parts)

    def work(config: Config, index: int) -> None:
        train(config, index, live)

    return work


class Watch:
    """What an island has recorded so far, in all of its lives; `read` takes in what is new."""

    def __init__(self, island: Island) -> None:
        self.commits: dict[int, RoundRecord] = {}
        self.num_steps = 0
        self._tail = Tail(island.folder / METRICS)

    def read(self) -> None:
        for record in self._tail.new_records():
            if isinstance(record, RoundRecord) and record.committed:
                self.commits[record.round] = record
            elif isinstance(record, StepRecord):
                self.num_steps += 1

    @property
    def last(self) -> int:
        """The last round that it has committed; -1: none."""
        return max(self.commits, default=-1)

    def seconds(self, round_number: int) -> float:
        """From commit to commit."""
        return self.commits[round_number].time - self.commits[round_number - 1].time


def family(rank: Rank) -> list[int]:
    """The process and what it has started: its libp2p daemon, if there is one."""
    children: list[int] = []
    for path in Path(f"/proc/{rank.pid}/task").glob("*/children"):
        children += map(int, path.read_text().split())
    return [*children, rank.pid]


def is_up(island: Island) -> bool:
    """Whether its process runs; one that has ended is reaped."""
    rank = island.ranks[0]
    if rank.exit_code is None:
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid:
            rank.exit_code = os.waitstatus_to_exitcode(status)
    return rank.exit_code is None
