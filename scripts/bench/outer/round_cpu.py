"""CPU time and memory of whole rounds between islands, per parameter, beside plain gloo.

    python -m scripts.bench.outer.round_cpu [--params 10e6] [--islands 2] [--rounds 5]
        [--what plain,gloo,gloo-int4]

plain is DiLoCo written in plain torch: subtract, `all_reduce` over gloo, SGD, copy back. The others
are our outer loop over the named transport and codec, with everything that a round does: snapshot,
plan, reduce, vote, outer step, digest of the state, merge. There are no inner steps. Every island
is a process with one thread, and the contestants take turns, so that the ratios hold on a busy
machine, too.

"CPU" is the time of the island's process in nanoseconds, without libp2p's daemon, which is another
process: the median of the islands. "held" and "peak" are bytes of resident memory beyond those of
the process before its params existed; the local params are 4 of these bytes. A second table splits
the CPU time by stage (scripts/bench/outer/round_stages.py).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch

from diloco.swarm.bootstrap import PREFIX
from diloco.watchdog.signals import end_with_parent
from outer.config import NETWORKS, OuterConfig
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.loop import build_loop
from outer.network.event_loop import EventLoopThread
from outer.space.ranks import RankGroup
from scripts.bench.arguments import choices
from scripts.bench.outer.round_stages import STAGES, StageTimes
from tests.outer.islands import FakeParams, identity_of
from tests.outer.nets import key_of

CONTESTANTS = {
    "plain": ("", ""),
    "gloo": ("gloo", "fp32"),
    "gloo-int4": ("gloo", "int4"),
    "tls": ("tls", "fp32"),
    "hivemind": ("hivemind", "fp32"),
}
"""(transport, codec) of each contestant; plain has neither."""
WARM_ROUNDS = 2
GUARD_SECONDS = 600
LAYER = (512, 2048)


@dataclass(frozen=True)
class Seat:
    """One island of one contestant."""

    what: str
    index: int
    num_islands: int
    num_params: int
    num_rounds: int
    bootstrap: str
    store: str
    """File in which the processes of the plain contestant meet."""


@dataclass(frozen=True)
class Cost:
    """What a round costs one island, per parameter."""

    cpu_ns: float
    wall_ns: float
    held_bytes: float
    peak_bytes: float
    stages: dict[str, float] = field(default_factory=dict)
    """CPU ns of each stage; empty for the plain contestant."""


def build_params(num_params: int) -> dict[str, torch.Tensor]:
    """Build matrices of about a layer's size, with about `num_params` elements in all."""
    size = LAYER[0] * LAYER[1]
    return {f"layers.{i}.w": torch.zeros(LAYER) for i in range(max(1, round(num_params / size)))}


def measure(
    seat: Seat, tensors: dict[str, torch.Tensor], run_round: Callable[[], None], before: int
) -> Cost:
    """Run all rounds, and measure those after the first WARM_ROUNDS."""
    times = StageTimes()
    for _ in range(WARM_ROUNDS):
        run_round()
    times.reset()
    cpu = time.process_time()
    wall = time.monotonic()
    num_params = sum(t.numel() for t in tensors.values())
    for _ in range(seat.num_rounds):
        run_round()
    each = seat.num_rounds * num_params
    cpu = time.process_time() - cpu
    wall = time.monotonic() - wall
    held = _memory("VmRSS") - before
    peak = _memory("VmHWM") - before
    stages = {stage: seconds / each * 1e9 for stage, seconds in times.seconds.items()}
    return Cost(cpu / each * 1e9, wall / each * 1e9, held / num_params, peak / num_params, stages)


def run_plain(seat: Seat, before: int) -> Cost:
    """Run DiLoCo in plain torch: mean pseudo-gradient by all_reduce, then Nesterov SGD."""
    import torch.distributed as dist

    store = dist.FileStore(seat.store, seat.num_islands)
    dist.init_process_group("gloo", store=store, rank=seat.index, world_size=seat.num_islands)
    local = build_params(seat.num_params)
    params = {name: torch.nn.Parameter(values.clone()) for name, values in local.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.7, momentum=0.9, nesterov=True)

    def run_round() -> None:
        for name, values in local.items():
            grad = params[name].detach() - values
            dist.all_reduce(grad)
            params[name].grad = grad.div_(seat.num_islands)
        optimizer.step()
        for name, values in local.items():
            values.copy_(params[name].detach())

    cost = measure(seat, local, run_round, before)
    dist.destroy_process_group()
    return cost


def run_ours(seat: Seat, before: int) -> Cost:
    """Run our outer loop over the network and codec that the contestant names."""
    transport, codec = CONTESTANTS[seat.what]
    rounds = WARM_ROUNDS + seat.num_rounds
    config = OuterConfig.model_validate(
        {
            "transport": transport,
            "codec": codec,
            "start_islands": seat.num_islands,
            "rounds": rounds,
        }
    )
    name = f"island-{seat.index}"
    loop = EventLoopThread()
    where = NetworkSettings(
        "bench", name, 0, [seat.bootstrap], island_key=key_of(name), connect_seconds=60
    )
    network = loop.run(open_network(transport, where))
    params = FakeParams(build_params(seat.num_params))
    outer = build_loop(config, identity_of(name), params, RankGroup(), network, loop)
    outer.begin()

    def run_round() -> None:
        outer.launch(1000)
        assert len(outer.land().reports) == 1, "every round is committed at its first attempt"

    cost = measure(seat, dict(enumerate(params.values)), run_round, before)  # type: ignore[arg-type]
    outer.finish()
    loop.run(network.close(), 20)
    return cost


def island_main(seat: Seat) -> None:
    """Run one island's process, and print its cost as a line of JSON."""
    end_with_parent()
    torch.set_num_threads(1)
    before = _memory("VmRSS")
    cost = (run_ours if CONTESTANTS[seat.what][0] else run_plain)(seat, before)
    print(json.dumps(asdict(cost)), flush=True)
    # gloo's threads sometimes abort during a normal interpreter shutdown.
    os._exit(0)


def run_contestant(
    what: str, num_islands: int, num_params: int, num_rounds: int, folder: Path
) -> Cost:
    """Return the medians over the islands of one contestant."""
    transport = CONTESTANTS[what][0]
    store = folder / f"store-{what}-{time.monotonic_ns()}"
    with _bootstrap(transport) as address:
        seats = [
            Seat(what, i, num_islands, num_params, num_rounds, address, str(store))
            for i in range(num_islands)
        ]
        words = [sys.executable, "-m", "scripts.bench.outer.round_cpu", "--seat"]
        children = [
            subprocess.Popen([*words, json.dumps(asdict(s))], stdout=subprocess.PIPE, text=True)
            for s in seats
        ]
        try:
            costs = [
                Cost(**json.loads(child.communicate(timeout=GUARD_SECONDS)[0]))
                for child in children
            ]
        finally:
            for child in children:
                child.kill()
    return middle(costs)


def middle(costs: Sequence[Cost]) -> Cost:
    """Return the median of each figure."""
    numbers = [[c.cpu_ns, c.wall_ns, c.held_bytes, c.peak_bytes] for c in costs]
    stages = {stage: median(c.stages[stage] for c in costs) for stage in costs[0].stages}
    return Cost(*map(median, zip(*numbers, strict=True)), stages)


@contextmanager
def _bootstrap(transport: str) -> Iterator[str]:
    if not transport:
        yield ""
        return
    kind = NETWORKS[transport].rendezvous
    words = ["-m", "diloco", "bootstrap", "--rendezvous", kind, "--host", "127.0.0.1"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(
            line.removeprefix(PREFIX).strip() for line in process.stdout if line.startswith(PREFIX)
        )
    finally:
        process.terminate()
        process.wait(20)


def _memory(field: str) -> int:
    """Return the bytes of resident memory: now (VmRSS) or at the peak (VmHWM)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def main() -> None:
    """Measure the contestants in turn and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=10e6, help="number of parameters")
    parser.add_argument("--islands", type=int, default=2, help="number of islands")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of measured rounds, after two that are not measured",
    )
    parser.add_argument("--what", type=choices(CONTESTANTS), default=["plain", "gloo", "gloo-int4"])
    parser.add_argument(
        "--repeats", type=int, default=1, help="turns of each contestant; the table has the medians"
    )
    parser.add_argument("--seat", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seat:
        island_main(Seat(**json.loads(arguments.seat)))
    found: dict[str, list[Cost]] = {what: [] for what in arguments.what}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repeats):
            for what, costs in found.items():
                size = arguments.islands, int(arguments.params), arguments.rounds
                costs.append(run_contestant(what, *size, Path(folder)))
    print(
        f"{arguments.islands} islands, {arguments.params:g} parameters; per round, island and "
        "parameter"
    )
    print_tables({what: middle(costs) for what, costs in found.items()})


def print_tables(costs: Mapping[str, Cost]) -> None:
    """Print one line for each contestant, and one for each stage of ours."""
    print(f"{'':14s}{'CPU ns':>11s}{'wall ns':>11s}{'held B':>11s}{'peak B':>11s}")
    for what, cost in costs.items():
        cells = (cost.cpu_ns, cost.wall_ns, cost.held_bytes, cost.peak_bytes)
        print(f"{what:14s}" + "".join(f"{cell:11.1f}" for cell in cells))
    staged = {what: cost for what, cost in costs.items() if cost.stages}
    print(f"\n{'CPU ns by stage':18s}" + "".join(f"{what:>11s}" for what in staged))
    for stage in STAGES:
        print(
            f"{stage:18s}"
            + "".join(f"{cost.stages.get(stage, 0.0):11.2f}" for cost in staged.values())
        )
    rest = (cost.cpu_ns - sum(cost.stages.values()) for cost in staged.values())
    print(f"{'everything else':18s}" + "".join(f"{ns:11.2f}" for ns in rest))


if __name__ == "__main__":
    main()
