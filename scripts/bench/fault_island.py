"""One island of the join figure: the outer loop as it is, on a model without training. It prints what happens to it.

    python -m scripts.bench.fault_island '{"index": 0, "kind": "gloo", ...}'

A line of JSON for each event: began (the network is open), entered (it has a state), round (a committed round).
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.signals import end_with_parent
from outer.config import OuterConfig
from outer.loop import LoopThread
from outer.network import NetworkSettings, open_network
from outer.reports import CaughtUp, Settings
from outer.sync import OuterLoop
from outer.team import Team
from tests.outer.islands import FakeParams, identity_of

ROWS = 1000
TOKENS = 1000
"""That a round is said to have been trained on."""


@dataclass(frozen=True)
class Seat:
    """An island's place in the run; rounds last `inner_steps` x `step_seconds` and what the reduce takes."""

    index: int
    kind: str
    host: str
    bootstrap: str
    num_params: int
    num_starting: int
    inner_steps: int
    step_seconds: float

    @property
    def joins(self) -> bool:
        return self.index >= self.num_starting


def main() -> None:
    """Live until killed."""
    end_with_parent()
    torch.set_num_threads(1)
    seat = Seat(**json.loads(sys.argv[1]))
    name = f"island-{seat.index}"
    loop = LoopThread()
    network = loop.run(
        open_network(
            seat.kind,
            NetworkSettings("bench", name, 0, [seat.bootstrap], listen_host=seat.host, connect_seconds=60),
        )
    )
    config = OuterConfig(rounds=100_000, inner_steps=seat.inner_steps, codec="int8", start_islands=seat.num_starting)
    shapes = [(ROWS, ROWS)] * (seat.num_params // ROWS**2)
    params = FakeParams({f"weights.{i}": torch.zeros(shape) for i, shape in enumerate(shapes)})
    outer = OuterLoop(config, identity_of(name), params, Team(), network, loop, Settings(joins=seat.joins))
    say("began")
    before = received_bytes(), network.transport.traffic.bytes_received
    position = outer.begin()
    counted = network.transport.traffic.bytes_received - before[1]
    say("entered", round=position.round, wire_bytes=received_bytes() - before[0], counted_bytes=counted)
    while True:
        train(outer, params, seat)
        try:
            report = outer.attempt(TOKENS)
        except CaughtUp as caught:
            say("caught up", round=outer.position.round, text=str(caught))
            continue
        say("round" if report.is_committed else "aborted", round=report.round, participants=report.participants)


def train(outer: OuterLoop, params: FakeParams, seat: Seat) -> None:
    """Fake inner steps, which change something and take their time."""
    for left in reversed(range(seat.inner_steps)):
        started = time.monotonic()
        params.values[left % len(params.values)].add_(1e-3)
        time.sleep(max(0.0, seat.step_seconds - (time.monotonic() - started)))
        outer.pace.observe_step(time.monotonic() - started)
        if left and outer.interruption(left):
            return


def received_bytes() -> int:
    """Bytes of frames that have come into this network namespace."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(lines[0][1]) if lines else 0


def say(event: str, **facts: Any) -> None:
    """One line."""
    print(json.dumps({"event": event, "time": time.time(), **facts}), flush=True)


if __name__ == "__main__":
    main()
