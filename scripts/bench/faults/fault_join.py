"""The cost of joining in bytes, time and slower rounds, on links of 100 Mbit/s (network namespaces;
needs root).
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from diloco.network_emulation.links import AccessLink, open_linked_namespaces
from diloco.network_emulation.namespaces import Namespace
from diloco.runtime.processes import Child, start, stop
from diloco.swarm.bootstrap import PREFIX
from outer.config import NETWORKS
from scripts.bench.faults.fault_island import FakeIslandSpec
from scripts.bench.faults.fault_stall import FaultBenchError

NUM_STARTING = 4
LINK_RATE = 100e6
STATE_BYTES = 8
"""Bytes per parameter: params and momentum in fp32."""
INNER_STEPS = 12
STEP_SECONDS = 1.0
ROUNDS_BEFORE = 4
GUARD_SECONDS = 400.0
Event = dict[str, Any]


@dataclass(frozen=True)
class Join:
    """One join, from the events of the joiner and of the other islands."""

    num_params: int
    began: float
    entered: float
    """Unix time at which the joiner had received its state."""
    wire_bytes: int
    state_round: int
    first_round: int
    """First committed round that includes the joiner."""
    first_commit: float
    slowest_round: float
    """Seconds of the other islands' slowest round during the state transfer."""
    rounds_before: float
    """Median seconds of the other islands' rounds before the join."""

    @property
    def ideal_seconds(self) -> float:
        return STATE_BYTES * self.num_params * 8 / LINK_RATE


class JoinBench:
    """Islands in separate network namespaces."""

    def __init__(
        self, namespaces: list[Namespace], kind: str, num_params: int, folder: Path
    ) -> None:
        self._namespaces = namespaces
        self._kind = kind
        self._num_params = num_params
        self._folder = folder
        self.started: list[Child] = []
        self._bootstrap = ""

    def start_bootstrap(self) -> None:
        """Start the bootstrap process in the last namespace."""
        place = self._namespaces[-1]
        rendezvous = NETWORKS[self._kind].rendezvous
        words = [
            sys.executable,
            "-m",
            "diloco",
            "bootstrap",
            "--rendezvous",
            rendezvous,
            "--host",
            place.host,
        ]
        child = self._start("bootstrap", place.command(*words))
        self.until(lambda: PREFIX in child.log.read_text(), "the bootstrap process")
        lines = [line for line in child.log.read_text().splitlines() if line.startswith(PREFIX)]
        self._bootstrap = lines[0].removeprefix(PREFIX)

    def start_island(self, index: int) -> None:
        place = self._namespaces[index]
        seat = FakeIslandSpec(
            index,
            self._kind,
            place.host,
            self._bootstrap,
            self._num_params,
            NUM_STARTING,
            INNER_STEPS,
            STEP_SECONDS,
        )
        words = [
            sys.executable,
            "-m",
            "scripts.bench.faults.fault_island",
            json.dumps(asdict(seat)),
        ]
        self._start(f"island-{index}", place.command(*words))

    def events(self, index: int) -> list[Event]:
        """Return the events that an island has printed so far."""
        path = self._folder / f"island-{index}.txt"
        text = path.read_text() if path.exists() else ""
        return [
            json.loads(line)
            for line in text.splitlines()
            if line.startswith('{"event"') and line.endswith("}")
        ]

    def rounds(self, index: int) -> list[Event]:
        return [event for event in self.events(index) if event["event"] == "round"]

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until `is_so()` is true. Raises FaultBenchError."""
        deadline = time.monotonic() + GUARD_SECONDS
        while not is_so():
            ended = [child for child in self.started if child.exit_code is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(
                    f"{child.name}:\n{child.log_tail(8)}" for child in ended or self.started
                )
                raise FaultBenchError(f"{what} did not happen within {GUARD_SECONDS:.0f} s\n{logs}")
            time.sleep(0.2)

    def _start(self, name: str, command: list[str]) -> Child:
        self.started.append(start(name, command, self._folder / f"{name}.txt"))
        return self.started[-1]


@contextmanager
def open_bench(kind: str, num_params: int, num_islands: int) -> Iterator[JoinBench]:
    """Start NUM_STARTING islands, in a network with room for more, and wait for ROUNDS_BEFORE
    committed rounds.
    """
    with (
        tempfile.TemporaryDirectory(prefix="diloco-faults-") as folder,
        open_linked_namespaces(num_islands + 1, AccessLink(LINK_RATE)) as namespaces,
    ):
        net = JoinBench(namespaces, kind, num_params, Path(folder))
        try:
            net.start_bootstrap()
            for index in range(NUM_STARTING):
                net.start_island(index)
            net.until(lambda: len(net.rounds(0)) >= ROUNDS_BEFORE, "the first rounds")
            yield net
        finally:
            stop(net.started)


def measure_joins(kind: str, num_params: int) -> tuple[Join, list[Join]]:
    """Measure one join alone, then three at once."""
    with open_bench(kind, num_params, NUM_STARTING + 4) as net:
        alone = _join(net, [NUM_STARTING], num_params)[0]
        return alone, _join(net, [NUM_STARTING + 1, NUM_STARTING + 2, NUM_STARTING + 3], num_params)


def _join(net: JoinBench, newcomers: list[int], num_params: int) -> list[Join]:
    before = net.rounds(0)
    for index in newcomers:
        net.start_island(index)
    net.until(lambda: all(net.rounds(index) for index in newcomers), "a round with all that join")
    return [_build_join(net, index, before, num_params) for index in newcomers]


def _build_join(net: JoinBench, index: int, before: list[Event], num_params: int) -> Join:
    events = {event["event"]: event for event in reversed(net.events(index))}
    began = events["began"]
    entered = events["entered"]
    first = events["round"]
    commits = [event["time"] for event in net.rounds(0)]
    # Rounds that overlap the time from the start of the joiner until it had its state.
    spans = [
        (a, b) for a, b in itertools.pairwise(commits) if b > began["time"] and a < entered["time"]
    ]
    times = [event["time"] for event in before]
    return Join(
        num_params=num_params,
        began=began["time"],
        entered=entered["time"],
        wire_bytes=entered["wire_bytes"],
        state_round=entered["round"],
        first_round=first["round"],
        first_commit=first["time"],
        slowest_round=max((b - a for a, b in spans), default=0.0),
        rounds_before=median(b - a for a, b in itertools.pairwise(times)),
    )
