"""Forked islands with a real bootstrap process, cheap to kill and restart, over either
transport.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config, parse_config
from diloco.faults.self_inflicted import FAULTS_FOLDER
from diloco.records.metrics import RoundRecord, StepRecord
from diloco.records.run_folder import METRICS, Tail
from diloco.runtime.processes import stop
from diloco.simulate.fleet import Fleet, start_bootstrap
from diloco.train import train
from tests.swarm import TINY, Island, Rank, Swarm, Work, swarm

POLL_SECONDS = 0.01
OVERRIDES = ("outer.rounds=100000", "evaluate.every_rounds=100000", "outer.optimizer.momentum=0.9")
"""These runs do not end by themselves."""


@contextmanager
def open_forked_swarm(
    folder: Path, transport: str, islands: list[dict[str, Any]], *overrides: str
) -> Iterator[tuple[Swarm, Fleet]]:
    """Open a swarm without islands, and a fleet that can restart its bootstrap process. Kills all
    at exit.
    """
    if transport == "hivemind":
        import hivemind  # noqa: F401 - the forked islands inherit it
    fleet = Fleet(folder / "bootstrap", [])
    kind = f"outer.transport={transport}"
    try:
        address = start_bootstrap(parse_config(TINY, [kind]), fleet.run_dir, fleet)
        with swarm(folder, kind, *OVERRIDES, *overrides, islands=islands, address=address) as made:
            for index in range(len(islands)):
                (folder / made.config.name / f"island-{index}" / FAULTS_FOLDER).mkdir(parents=True)
            yield made, fleet
    finally:
        stop(fleet.started)


def train_at_pace(step_seconds: float) -> Work:
    """Train as `diloco train` does, with inner steps of a fixed duration that does not depend on
    the machine's load.
    """

    def live(parts: Runtime) -> None:
        slower = parts.slow_down

        def slow_down(seconds: float) -> None:
            time.sleep(max(0.0, step_seconds - seconds))
            slower(max(step_seconds, seconds))

        parts.slow_down = slow_down
        life.run(parts)

    def work(config: Config, index: int) -> None:
        train(config, index, live)

    return work


class RecordReader:
    """The records of an island over all of its restarts. `read` adds new ones."""

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
        """Number of the last committed round, or -1."""
        return max(self.commits, default=-1)

    def seconds(self, round_number: int) -> float:
        """Seconds from the previous commit to that of the round."""
        return self.commits[round_number].time - self.commits[round_number - 1].time


def process_tree(rank: Rank) -> list[int]:
    """Pids of the process and its children, such as its libp2p daemon."""
    children: list[int] = []
    for path in Path(f"/proc/{rank.pid}/task").glob("*/children"):
        children += map(int, path.read_text().split())
    return [*children, rank.pid]


def is_up(island: Island) -> bool:
    """Whether a process of the island runs. Processes that have ended are reaped."""
    for rank in island.ranks:
        if rank.exit_code is None:
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                rank.exit_code = os.waitstatus_to_exitcode(status)
    return any(rank.exit_code is None for rank in island.ranks)
