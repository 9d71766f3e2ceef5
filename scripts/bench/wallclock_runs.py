"""The runs of scripts/bench/wallclock.py: machines on shaped links, and what a run's records say of its time."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from diloco.links import linked_namespaces, parse_link, sent_bytes
from diloco.netns import Namespace
from diloco.processes import Child, start, stop
from diloco.runfiles import BASELINE, IslandRecords, read_facts, read_island, read_run
from scripts.bench.simulation import RUN_SECONDS, simulated_in

MACHINES = 4
PORT = 29500
"""Of torchrun's store, in a namespace where nothing else listens."""
REPLICAS = f"island.mesh={{dp_replicate: {MACHINES}, dp_shard: 1}}"
"""Every rank has the whole model; gradients are all-reduced."""
LOG_LINES = 30
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Run:
    """What is to be run; `arguments` are config and overrides, as on the command line of `diloco simulate`."""

    row: str
    seed: int
    link: str
    arguments: tuple[str, ...]

    @property
    def settings(self) -> str:
        """What tells it from other runs of its row."""
        return " ".join([self.link, *self.arguments])


@dataclass(frozen=True)
class Result:
    """What came of a run. Seconds are of the wall clock, since the first inner step began on any machine."""

    row: str
    seed: int
    settings: str
    curve: list[tuple[float, float]]
    """Seconds at which the last machine had measured a held-out loss, and the loss."""
    num_steps: int
    step_seconds: float
    """The median of the inner steps; of data-parallel training with the all-reduce of gradients in it."""
    stalled_seconds: float
    """That inner steps stood still for rounds in all; the mean of the machines."""
    sent_bytes: float
    """That a machine's link has carried up in the whole run, headers and all; the mean of the machines."""
    load: float
    """The system's load average before the run."""


def islands_run(run: Run) -> Result | None:
    """Four islands of one rank; None when it failed, and then its last lines are on stderr."""
    load = os.getloadavg()[0]
    with TemporaryDirectory(prefix="wallclock-") as folder:
        run_dir = simulated_in(
            Path(folder), ["--islands", str(MACHINES), "--ranks", "1", "--link", run.link, *run.arguments]
        )
        if run_dir is None:
            return None
        facts = read_facts(run_dir)
        assert facts is not None and facts.wire_bytes_sent is not None, "simulate counts what links carry"
        sent = mean(facts.wire_bytes_sent.values())
        return result_of(run, read_run(run_dir).islands, sent, load)


def data_parallel_run(run: Run) -> Result | None:
    """One island of four ranks, each behind a link of its own; None when it failed, with its last lines on stderr."""
    load = os.getloadavg()[0]
    with (
        TemporaryDirectory(prefix="wallclock-") as name,
        linked_namespaces(MACHINES, parse_link(run.link)[1]) as places,
    ):
        folder, ranks = Path(name), []
        try:
            for number in range(MACHINES):
                ranks.append(start_rank(places, number, run.arguments, folder))
            if not ended_well(ranks):
                print(*(f"{rank.name}:\n{rank.log_tail(LOG_LINES)}" for rank in ranks), sep="\n", file=sys.stderr)
                return None
        finally:
            stop(ranks)
        sent = mean(sent_bytes(place) for place in places)
        return result_of(run, [read_island(folder / "run" / BASELINE)], sent, load)


def start_rank(places: Sequence[Namespace], number: int, arguments: Sequence[str], folder: Path) -> Child:
    """The torchrun of one of the data-parallel ranks, in its namespace, as on a machine of its own."""
    nodes = ["--nnodes", str(MACHINES), "--node-rank", str(number), "--nproc-per-node", "1"]
    meeting = ["--master-addr", places[0].host, "--master-port", str(PORT)]
    own = ["name=run", f"island.run_dir={folder}", REPLICAS, "--islands", str(MACHINES), "--ranks", str(MACHINES)]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting, "-m", "diloco", "baseline"]
    inside = places[number].command(*command, *arguments, *own)
    return start(f"rank {number}", inside, folder / f"rank-{number}.txt", {"GLOO_SOCKET_IFNAME": "eth0"})


def ended_well(ranks: Sequence[Child]) -> bool:
    """Whether all end with status 0, none too late; returns as soon as one fails."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline and any(rank.exit_code is None for rank in ranks):
        if any(rank.exit_code for rank in ranks):
            return False
        time.sleep(POLL_SECONDS)
    return all(rank.exit_code == 0 for rank in ranks)


def result_of(run: Run, machines: Sequence[IslandRecords], sent: float, load: float) -> Result:
    """The result that is in the records of all machines that have any."""
    steps = [step for machine in machines for step in machine.steps]
    begun_at = min(step.time - step.seconds for step in steps)
    stalled = [sum(round.stalled_seconds for round in machine.rounds) for machine in machines]
    return Result(
        row=run.row,
        seed=run.seed,
        settings=run.settings,
        curve=curve_of(machines, begun_at),
        num_steps=max(step.step for step in steps),
        step_seconds=median(step.seconds for step in steps),
        stalled_seconds=mean(stalled),
        sent_bytes=sent,
        load=load,
    )


def curve_of(machines: Sequence[IslandRecords], begun_at: float) -> list[tuple[float, float]]:
    """Held-out losses at the seconds since `begun_at`; not that of the untrained model, which only islands measure."""
    evals = [record for machine in machines for record in machine.evals if record.round > 0]
    curve: list[tuple[float, float]] = []
    for number in sorted({record.round for record in evals}):
        records = [record for record in evals if record.round == number]
        losses = [record.loss for record in records if record.loss is not None]
        if losses:
            curve.append((max(record.time for record in records) - begun_at, mean(losses)))
    return curve


def seconds_to(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """When the held-out loss came down to `loss`, linear between two measurements; None if it never did."""
    before: tuple[float, float] | None = None
    for seconds, measured in curve:
        if measured <= loss and before is None:
            return seconds
        if measured <= loss and before is not None:
            share = (before[1] - loss) / (before[1] - measured)
            return before[0] + share * (seconds - before[0])
        before = (seconds, measured)
    return None
