"""One island of utilisation.py: the real outer loop around inner steps that sleep, or compute.

    python -m scripts.bench.utilisation.utilisation_island \\
        '{"index": 0, "host": "10.213.0.2", ..., "tasks": [...]}'

It runs its tasks one after the other and prints a line of JSON for each round that lands.
"""

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from diloco.network_emulation.links import sent_bytes
from diloco.network_emulation.namespaces import Namespace
from diloco.watchdog.signals import end_with_parent
from outer.config import OuterConfig
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.loop import OuterLoop, build_loop
from outer.network.event_loop import EventLoopThread
from outer.space.ranks import RankGroup
from tests.outer.islands import FakeParams, identity_of
from tests.outer.nets import key_of

TOKENS = 1000
"""Number of trained tokens that each round reports."""
DIM = 256
VOCABULARY = 4096
LAYER = (DIM, 3 * DIM)
CONNECT_SECONDS = 60.0
PRODUCT_DIM = 256


@dataclass(frozen=True)
class Task:
    """The outer loop of one run and the size of its model."""

    outer: dict[str, Any]
    num_params: int
    step_seconds: float
    products: int = 0
    """Matrix products in an inner step, which then lasts as long as they take.

    0: the step sleeps for `step_seconds`.
    """

    @property
    def config(self) -> OuterConfig:
        return OuterConfig.model_validate(self.outer)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, at least 2M parameters.

        Fragments depend on the names, which are a model's.
        """
        layers = max(1, round((self.num_params - 2 * VOCABULARY * DIM) / (LAYER[0] * LAYER[1])))
        inside = {f"layers.{i}.w": LAYER for i in range(layers)}
        table = (VOCABULARY, DIM)
        return {"embed.weight": table, **inside, "norm.weight": (DIM,), "head.weight": table}


@dataclass(frozen=True)
class TimedIslandSpec:
    """One island, which runs all tasks."""

    index: int
    namespace: str
    host: str
    port: str
    bootstrap: str
    counts_wire: bool
    """Whether each round's line includes the bytes sent on the link, which takes some milliseconds
    to read.
    """
    tasks: list[dict[str, Any]]


class IslandLoop:
    """The training loop of one task, in the order of diloco/island.py."""

    def __init__(
        self, task: Task, number: int, outer: OuterLoop, params: FakeParams, place: Namespace | None
    ) -> None:
        self._task = task
        self._number = number
        self._outer = outer
        self._params = params
        self._place = place
        self._config = task.config
        self._launch_seconds = self._stepped_seconds = 0.0
        self._factor = torch.rand(PRODUCT_DIM, PRODUCT_DIM)

    def run(self) -> None:
        """Run all rounds."""
        outer = self._outer
        rounds = self._config.num_rounds
        outer.begin()
        while outer.position.round < rounds:
            if outer.round < rounds:
                self.inner_steps()
                started_at = time.monotonic()
                outer.launch(TOKENS)
                self._launch_seconds = time.monotonic() - started_at
            if self._config.delay == 0 or outer.round == rounds:
                self.land()
        outer.finish()

    def inner_steps(self) -> None:
        """Make the round's inner steps.

        Steps after a late one are shortened to make up for it, unless the outer loop caused the
        delay.
        """
        outer = self._outer
        steps = self._outer.inner_steps()
        due_at = time.monotonic()
        for done in range(1, steps + 1):
            due_at = due_at + self._task.step_seconds
            started_at = time.monotonic()
            self._params.values[done % len(self._params.values)].add_(1e-3)
            multiply(self._factor, self._task.products)
            if not self._task.products:
                time.sleep(max(0.0, due_at - time.monotonic()))
            self._stepped_seconds += time.monotonic() - started_at
            outer.pace.observe_step(self._task.step_seconds)
            outer.interruption(steps - done)
            if outer.in_flight is not None and (done >= self._config.delay or done == steps):
                self.land()
                due_at = time.monotonic()

    def land(self) -> None:
        """Wait for the round in flight and print its timing."""
        launch_seconds = self._launch_seconds
        started_at = time.monotonic()
        landing = self._outer.land()
        ended_at = time.monotonic()
        report = landing.reports[-1]
        facts = {
            "task": self._number,
            "round": report.round,
            "time": ended_at,
            "attempts": len(landing.reports),
            "participants": len(report.participants),
            "launch": launch_seconds,
            "waited": landing.waited_seconds,
            "stepped": self._stepped_seconds,
            "cpu": time.process_time(),
            "merge": ended_at - started_at - landing.waited_seconds,
            "plan": report.wait_seconds,
            "reduce": report.reduce_seconds,
            "counted": report.bytes_sent,
            "wire": sent_bytes(self._place) if self._place is not None else 0,
        }
        self._stepped_seconds = 0.0
        print(json.dumps(facts), flush=True)


def multiply(factor: torch.Tensor, products: int) -> None:
    """Compute `products` matrix products."""
    for _ in range(products):
        factor @ factor


def main() -> None:
    """Run all tasks."""
    end_with_parent()
    torch.set_num_threads(1)
    seat = TimedIslandSpec(**json.loads(sys.argv[1]))
    try:
        for number, task in enumerate(seat.tasks):
            run_task(seat, number, Task(**task))
    except Exception:  # noqa: BLE001 - the bench shows any error
        traceback.print_exc()
        os._exit(1)
    # gloo's threads sometimes abort during a normal interpreter shutdown.
    os._exit(0)


def run_task(seat: TimedIslandSpec, number: int, task: Task) -> None:
    """Run one task with its own network and params."""
    config = task.config
    name = f"island-{seat.index}"
    loop = EventLoopThread()
    where = NetworkSettings(
        f"bench-{number}",
        name,
        0,
        [seat.bootstrap],
        listen_host=seat.host,
        island_key=key_of(name),
        connect_seconds=CONNECT_SECONDS,
    )
    network = loop.run(open_network(config.transport, where))
    params = FakeParams({name: torch.zeros(shape) for name, shape in task.shapes.items()})
    place = Namespace(seat.namespace, seat.host, seat.port) if seat.counts_wire else None
    outer = build_loop(config, identity_of(name), params, RankGroup(), network, loop)
    IslandLoop(task, number, outer, params, place).run()
    loop.run(network.close(), CONNECT_SECONDS)
    loop.close()


if __name__ == "__main__":
    main()
