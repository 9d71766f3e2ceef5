"""The runs of scripts/bench/utilisation.py: what each is, as the planner sees it, and its processes."""

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

from diloco.bootstrap import PREFIX
from diloco.links import Link, linked_namespaces, parse_link
from diloco.netns import Namespace
from diloco.planning import predict as planning
from diloco.planning.host_speed import measure
from diloco.planning.predict import Case, predict
from diloco.planning.specs import Spec
from diloco.processes import Child, start, stop
from outer.config import OuterConfig
from scripts.bench.utilisation_island import Seat, Task

WARM_CYCLES = 1
GUARD_SECONDS = 300.0
Event = dict[str, Any]


class BenchError(Exception):
    """A run did not end, or not as it should."""


@dataclass(frozen=True)
class Run:
    """A task on equal links."""

    link_text: str
    num_islands: int
    task: Task

    @property
    def link(self) -> Link:
        return parse_link(self.link_text)[1]

    @property
    def config(self) -> OuterConfig:
        return self.task.config

    @property
    def case(self) -> Case:
        """As the planner sees it: islands share this machine's cores."""
        specs = tuple(Spec(name, shape) for name, shape in self.task.shapes.items())
        speed = measure(self.config).shared(max(1.0, self.num_islands / (os.cpu_count() or 1)))
        link = planning.Link(self.link.rate, self.link.rtt)
        return Case(
            outer=self.config,
            specs=specs,
            num_islands=self.num_islands,
            step_seconds=self.task.step_seconds,
            link=link,
            speed=speed,
        )


def task_of(num_params: int, step_seconds: float, num_islands: int, **outer: Any) -> Task:
    """A run of these settings, all else as in a run's config."""
    config = OuterConfig.model_validate({"start_islands": num_islands, "fragment_pattern": "balanced"} | outer)
    return Task(config.model_dump(), num_params, step_seconds)


def lasting(run: Run, seconds: float) -> Run:
    """The same with so many rounds that what is measured takes about so long: two cycles at least, eight at most."""
    cycles = round(min(max(seconds / predict(run.case).total_seconds, 2), 8))
    rounds = WARM_CYCLES + cycles + (run.config.delay > 0)
    return replace(run, task=replace(run.task, outer=run.task.outer | {"rounds": rounds}))


def done(runs: Sequence[Run], *, counts_wire: bool = False) -> Generator[list[list[Event]], None, None]:
    """Of each run, which have the link and number of islands in common: what each island said of its rounds."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name, _islands(runs, Path(name), counts_wire) as all_:
        *islands, _ = all_
        for number, run in enumerate(runs):
            found = [[]]
            deadline = time.monotonic() + GUARD_SECONDS
            while min(map(len, found)) < run.config.num_rounds:
                found = [_events(child, number) for child in islands]
                failed = [child for child in all_ if child.exit_code]
                if failed or time.monotonic() > deadline:
                    raise BenchError("\n".join(f"{child.name}:\n{child.log_tail()}" for child in failed or all_))
                time.sleep(0.2)
            _check(found, run)
            yield found


@contextmanager
def _islands(runs: Sequence[Run], folder: Path, counts_wire: bool) -> Iterator[list[Child]]:
    """The islands' processes, and at last the one where they find each other."""
    first = runs[0]
    with linked_namespaces(first.num_islands + 1, first.link) as (*places, meeting):
        started: list[Child] = []
        try:
            rendezvous = "tcp" if first.config.transport == "gloo" else "dht"
            words = ["-m", "diloco", "bootstrap", "--rendezvous", rendezvous, "--host", meeting.host]
            child = start("bootstrap", meeting.command(sys.executable, *words), folder / "bootstrap.txt")
            started.append(child)
            address = _address(child)
            for index, place in enumerate(places):
                started.insert(index, _start_island(runs, index, place, address, folder, counts_wire))
            yield started
        finally:
            stop(started)


def _start_island(
    runs: Sequence[Run], index: int, place: Namespace, address: str, folder: Path, counts_wire: bool
) -> Child:
    tasks = [asdict(run.task) for run in runs]
    seat = Seat(index, place.name, place.host, place.port, address, counts_wire, tasks)
    words = ["-m", "scripts.bench.utilisation_island", json.dumps(asdict(seat))]
    return start(f"island-{index}", place.command(sys.executable, *words), folder / f"island-{index}.txt")


def _address(bootstrap: Child) -> str:
    deadline = time.monotonic() + GUARD_SECONDS
    while time.monotonic() < deadline and bootstrap.exit_code is None:
        for line in bootstrap.log.read_text().splitlines():
            if line.startswith(PREFIX):
                return line.removeprefix(PREFIX)
        time.sleep(0.1)
    raise BenchError(f"bootstrap:\n{bootstrap.log_tail()}")


def _events(island: Child, number: int) -> list[Event]:
    lines = island.log.read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.startswith('{"task"') and line.endswith("}\n")]
    return [event for event in events if event["task"] == number]


def _check(found: list[list[Event]], run: Run) -> None:
    """Raise BenchError unless all islands were in every round, and at once."""
    for event in (event for events in found for event in events):
        if event["participants"] != run.num_islands or event["attempts"] != 1:
            raise BenchError(f"a round without all islands, or not at once: {event}")
