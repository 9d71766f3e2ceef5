"""The runs of utilisation.py: their settings, the planner's view of them, and their processes."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diloco.network_emulation.links import AccessLink, open_linked_namespaces, parse_link
from diloco.network_emulation.namespaces import Namespace
from diloco.planning import predict as planning
from diloco.planning.predict import Case, predict
from diloco.runtime.processes import Child, start, stop
from diloco.swarm.bootstrap import PREFIX
from inner.param_spec import ParamSpec
from outer.config import OuterConfig
from outer.cost import HostSpeed, measure_host_speed
from scripts.bench.utilisation.utilisation_island import Task, TimedIslandSpec

WARM_CYCLES = 1
GUARD_SECONDS = 300.0
Event = dict[str, Any]


class BenchError(Exception):
    """A run did not finish, or not as expected."""


@dataclass(frozen=True)
class PlannedRun:
    """A task on islands with equal links."""

    link_text: str
    num_islands: int
    task: Task

    @property
    def link(self) -> AccessLink:
        return parse_link(self.link_text)[1]

    @property
    def config(self) -> OuterConfig:
        return self.task.config

    @property
    def case(self) -> Case:
        """The run as the planner's input. The islands share this machine's cores."""
        specs = tuple(ParamSpec(name, shape) for name, shape in self.task.shapes.items())
        share = max(1.0, self.num_islands / (os.cpu_count() or 1))
        speed = HostSpeed(
            **{
                name: seconds * share
                for name, seconds in vars(measure_host_speed(self.config)).items()
            }
        )
        link = planning.LinkSpeed(self.link.rate, self.link.rtt)
        return Case(
            outer=self.config,
            specs=specs,
            num_islands=self.num_islands,
            step_seconds=self.task.step_seconds,
            link=link,
            speed=speed,
        )


def build_task(num_params: int, step_seconds: float, num_islands: int, **outer: Any) -> Task:
    """Build a task with these settings of the outer loop and defaults for all others."""
    config = OuterConfig.model_validate(
        {"start_islands": num_islands, "fragment_pattern": "balanced"} | outer
    )
    return Task(config.model_dump(), num_params, step_seconds)


def with_duration(run: PlannedRun, seconds: float) -> PlannedRun:
    """Return the run with the rounds that take about `seconds`: two to eight measured cycles."""
    cycles = round(min(max(seconds / predict(run.case).total_seconds, 2), 8))
    rounds = WARM_CYCLES + cycles + (run.config.delay > 0)
    return replace(run, task=replace(run.task, outer=run.task.outer | {"rounds": rounds}))


def run_all(
    runs: Sequence[PlannedRun], *, counts_wire: bool = False
) -> Generator[list[list[Event]], None, None]:
    """Run all runs, which share link and number of islands, and yield for each the events of every
    island.
    """
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        _start_islands(runs, Path(name), counts_wire) as children,
    ):
        *islands, _ = children
        for number, run in enumerate(runs):
            found = [[]]
            deadline = time.monotonic() + GUARD_SECONDS
            while min(map(len, found)) < run.config.num_rounds:
                found = [_read_events(child, number) for child in islands]
                failed = [child for child in children if child.exit_code]
                if failed or time.monotonic() > deadline:
                    raise BenchError(
                        "\n".join(
                            f"{child.name}:\n{child.log_tail()}" for child in failed or children
                        )
                    )
                time.sleep(0.2)
            _check_events(found, run)
            yield found


@contextmanager
def _start_islands(
    runs: Sequence[PlannedRun], folder: Path, counts_wire: bool
) -> Iterator[list[Child]]:
    """Start the islands' processes and the bootstrap process, which comes last."""
    first = runs[0]
    with open_linked_namespaces(first.num_islands + 1, first.link) as (*namespaces, meeting):
        started: list[Child] = []
        try:
            rendezvous = first.config.network.rendezvous
            words = [
                "-m",
                "diloco",
                "bootstrap",
                "--rendezvous",
                rendezvous,
                "--host",
                meeting.host,
            ]
            child = start(
                "bootstrap", meeting.command(sys.executable, *words), folder / "bootstrap.txt"
            )
            started.append(child)
            address = _read_address(child)
            for index, place in enumerate(namespaces):
                started.insert(
                    index, _start_island(runs, index, place, address, folder, counts_wire)
                )
            yield started
        finally:
            stop(started)


def _start_island(
    runs: Sequence[PlannedRun],
    index: int,
    place: Namespace,
    address: str,
    folder: Path,
    counts_wire: bool,
) -> Child:
    tasks = [asdict(run.task) for run in runs]
    seat = TimedIslandSpec(index, place.name, place.host, place.port, address, counts_wire, tasks)
    words = ["-m", "scripts.bench.utilisation.utilisation_island", json.dumps(asdict(seat))]
    return start(
        f"island-{index}", place.command(sys.executable, *words), folder / f"island-{index}.txt"
    )


def _read_address(bootstrap: Child) -> str:
    deadline = time.monotonic() + GUARD_SECONDS
    while time.monotonic() < deadline and bootstrap.exit_code is None:
        for line in bootstrap.log.read_text().splitlines():
            if line.startswith(PREFIX):
                return line.removeprefix(PREFIX)
        time.sleep(0.1)
    raise BenchError(f"bootstrap:\n{bootstrap.log_tail()}")


def _read_events(island: Child, number: int) -> list[Event]:
    lines = island.log.read_text().splitlines(keepends=True)
    events = [
        json.loads(line) for line in lines if line.startswith('{"task"') and line.endswith("}\n")
    ]
    return [event for event in events if event["task"] == number]


def _check_events(found: list[list[Event]], run: PlannedRun) -> None:
    """Raise BenchError unless all islands were in every round at the first attempt."""
    for event in (event for events in found for event in events):
        if event["participants"] != run.num_islands or event["attempts"] != 1:
            raise BenchError(f"a round lacks islands or needed a second attempt: {event}")
