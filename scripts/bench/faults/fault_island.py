"""One island of `fault_join.py`: the real outer loop on a model that is not trained. It prints its
events.

    python -m scripts.bench.faults.fault_island '{"index": 0, "kind": "gloo", ...}'

Each event is a line of JSON: began (the network is open), entered (the island has a state), round
(a round committed).
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.watchdog.signals import end_with_parent
from outer.config import OuterConfig
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.loop import OuterLoop, build_loop
from outer.network.event_loop import EventLoopThread
from outer.report import CaughtUp, LoopSettings
from outer.space.ranks import RankGroup
from tests.outer.islands import FakeParams, identity_of
from tests.outer.nets import key_of

ROWS = 1000
TOKENS = 1000
"""Number of trained tokens that each round reports."""


@dataclass(frozen=True)
class FakeIslandSpec:
    """One island of the run. A round lasts `inner_steps` x `step_seconds` plus the time of the
    reduce.
    """

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
    """Run until killed."""
    end_with_parent()
    torch.set_num_threads(1)
    seat = FakeIslandSpec(**json.loads(sys.argv[1]))
    name = f"island-{seat.index}"
    loop = EventLoopThread()
    network = loop.run(
        open_network(
            seat.kind,
            NetworkSettings(
                "bench",
                name,
                0,
                [seat.bootstrap],
                listen_host=seat.host,
                island_key=key_of(name),
                connect_seconds=60,
            ),
        )
    )
    config = OuterConfig(
        rounds=100_000, inner_steps=seat.inner_steps, codec="int8", start_islands=seat.num_starting
    )
    shapes = [(ROWS, ROWS)] * (seat.num_params // ROWS**2)
    params = FakeParams({f"weights.{i}": torch.zeros(shape) for i, shape in enumerate(shapes)})
    outer = build_loop(
        config,
        identity_of(name),
        params,
        RankGroup(),
        network,
        loop,
        LoopSettings(joins=seat.joins),
    )
    print_event("began")
    before = received_bytes(), network.transport.traffic.bytes_received
    position = outer.begin()
    counted = network.transport.traffic.bytes_received - before[1]
    print_event(
        "entered",
        round=position.round,
        wire_bytes=received_bytes() - before[0],
        counted_bytes=counted,
    )
    while True:
        make_fake_steps(outer, params, seat)
        try:
            outer.launch(TOKENS)
            reports = outer.land().reports
        except CaughtUp as caught:
            print_event("caught up", round=outer.position.round, text=str(caught))
            continue
        for report in reports:
            print_event(
                "round" if report.is_committed else "aborted",
                round=report.round,
                participants=report.participants,
            )


def make_fake_steps(outer: OuterLoop, params: FakeParams, seat: FakeIslandSpec) -> None:
    """Make inner steps that change a parameter and last `step_seconds` each."""
    for left in reversed(range(seat.inner_steps)):
        started = time.monotonic()
        params.values[left % len(params.values)].add_(1e-3)
        time.sleep(max(0.0, seat.step_seconds - (time.monotonic() - started)))
        outer.pace.observe_step(time.monotonic() - started)
        if left and outer.interruption(left):
            return


def received_bytes() -> int:
    """Return the bytes of frames received in this network namespace."""
    lines = [
        line.split() for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line
    ]
    return int(lines[0][1]) if lines else 0


def print_event(event: str, **facts: Any) -> None:
    """Print one event as a line of JSON."""
    print(json.dumps({"event": event, "time": time.time(), **facts}), flush=True)


if __name__ == "__main__":
    main()
