"""The runs of wallclock.py: machines on shaped links, and their timing from the run's records."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from diloco.network_emulation.links import open_linked_namespaces, parse_link, sent_bytes
from diloco.network_emulation.namespaces import Namespace
from diloco.records.run_folder import BASELINE, IslandRecords, read_facts, read_island, read_run
from diloco.runtime.processes import Child, start, stop
from scripts.bench.simulation import RUN_SECONDS, run_simulation_in

MACHINES = 4
PORT = 29500
"""Port of torchrun's store, in a namespace where nothing else listens."""
REPLICAS = f"island.mesh={{dp_replicate: {MACHINES}, dp_shard: 1}}"
"""Override with which every rank holds the whole model, and gradients are all-reduced."""
LOG_LINES = 30
POLL_SECONDS = 0.1
GLOO_ENV = {"GLOO_SOCKET_IFNAME": "eth0"}
StartMachine = Callable[[Sequence[Namespace], int, Sequence[str], Path], Child]
"""(namespaces of all machines, number of this one, config and overrides, folder of the run) -> its
process.
"""


@dataclass(frozen=True)
class WallclockRun:
    """A run to make. `arguments` are config and overrides, as on the command line of `diloco
    simulate`.
    """

    row: str
    seed: int
    link: str
    arguments: tuple[str, ...]
    rival: str = ""
    """The kind of rival, for scripts/bench/wallclock/wallclock_machine.py; "" for our own
    training.
    """

    @property
    def settings(self) -> str:
        """Settings that distinguish the run from other runs of its row."""
        return " ".join([self.link, *filter(None, [self.rival]), *self.arguments])


@dataclass(frozen=True)
class WallclockResult:
    """The result of a run, in seconds of wall time since the first inner step on any machine."""

    row: str
    seed: int
    settings: str
    curve: list[tuple[float, float]]
    """(seconds until the last machine had measured a held-out loss, the loss)."""
    num_steps: int
    step_seconds: float
    """Median of the inner steps. For data-parallel training it includes the all-reduce of
    gradients.
    """
    stalled_seconds: float
    """Total time in which rounds stalled inner steps, averaged over the machines."""
    sent_bytes: float
    """Bytes that a machine sent on its link in the whole run, with headers, averaged over the
    machines.
    """
    load: float
    """The system's load average before the run."""


def run_islands(run: WallclockRun) -> WallclockResult | None:
    """Run four islands of one rank. On failure, print the last lines to stderr and return None."""
    load = os.getloadavg()[0]
    with TemporaryDirectory(prefix="wallclock-") as folder:
        run_dir = run_simulation_in(
            Path(folder),
            ["--islands", str(MACHINES), "--ranks", "1", "--link", run.link, *run.arguments],
        )
        if run_dir is None:
            return None
        facts = read_facts(run_dir)
        assert facts is not None and facts.wire_bytes_sent is not None, (
            "simulate counts the bytes of the links"
        )
        sent = mean(facts.wire_bytes_sent.values())
        return build_result(run, read_run(run_dir).islands, sent, load)


def run_data_parallel(run: WallclockRun) -> WallclockResult | None:
    """Run one island of four ranks, each on its own link. On failure, print the last lines and
    return None.
    """
    return run_machines(run, start_rank)


def run_rival(run: WallclockRun, python: str) -> WallclockResult | None:
    """Run a rival, which this Python can import, on four machines. On failure, print the last lines
    and return None.
    """
    return run_machines(run, partial(start_rival, run.rival, python))


def run_machines(run: WallclockRun, start_one: StartMachine) -> WallclockResult | None:
    """Run four machines that `start_one` starts. On failure, print the last lines and return
    None.
    """
    load = os.getloadavg()[0]
    with (
        TemporaryDirectory(prefix="wallclock-") as name,
        open_linked_namespaces(MACHINES, parse_link(run.link)[1]) as namespaces,
    ):
        folder = Path(name)
        ranks = []
        try:
            for number in range(MACHINES):
                ranks.append(start_one(namespaces, number, run.arguments, folder))
            if not wait_for_ranks(ranks):
                print(
                    *(f"{rank.name}:\n{rank.log_tail(LOG_LINES)}" for rank in ranks),
                    sep="\n",
                    file=sys.stderr,
                )
                return None
        finally:
            stop(ranks)
        sent = mean(sent_bytes(namespace) for namespace in namespaces)
        baseline = folder / "run" / BASELINE
        machines = (
            [read_island(baseline)] if baseline.exists() else read_run(folder / "run").islands
        )
        return build_result(run, machines, sent, load)


def start_rank(
    namespaces: Sequence[Namespace], number: int, arguments: Sequence[str], folder: Path
) -> Child:
    """Start torchrun for one data-parallel rank in its namespace, as on a machine of its own."""
    nodes = ["--nnodes", str(MACHINES), "--node-rank", str(number), "--nproc-per-node", "1"]
    meeting = ["--master-addr", namespaces[0].host, "--master-port", str(PORT)]
    own = [
        "name=run",
        f"island.run_dir={folder}",
        REPLICAS,
        "--islands",
        str(MACHINES),
        "--ranks",
        str(MACHINES),
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *nodes,
        *meeting,
        "-m",
        "diloco",
        "baseline",
    ]
    inside = namespaces[number].command(*command, *arguments, *own)
    return start(f"rank {number}", inside, folder / f"rank-{number}.txt", GLOO_ENV)


def start_rival(
    kind: str,
    python: str,
    namespaces: Sequence[Namespace],
    number: int,
    arguments: Sequence[str],
    folder: Path,
) -> Child:
    """Start one machine of a rival in its namespace."""
    env = {"RANK": str(number), "WORLD_SIZE": str(MACHINES), "HOST": namespaces[number].host}
    env |= {"MASTER_ADDR": namespaces[0].host, "MASTER_PORT": str(PORT)}
    words = [kind, *arguments, "name=run", f"island.run_dir={folder}"]
    inside = namespaces[number].command(
        python, "-m", "scripts.bench.wallclock.wallclock_machine", *words
    )
    return start(f"machine {number}", inside, folder / f"machine-{number}.txt", GLOO_ENV | env)


def wait_for_ranks(ranks: Sequence[Child]) -> bool:
    """Wait for all ranks. Returns whether all end in time with status 0; returns early when one
    fails.
    """
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline and any(rank.exit_code is None for rank in ranks):
        if any(rank.exit_code for rank in ranks):
            return False
        time.sleep(POLL_SECONDS)
    return all(rank.exit_code == 0 for rank in ranks)


def build_result(
    run: WallclockRun, machines: Sequence[IslandRecords], sent: float, load: float
) -> WallclockResult:
    """Build the result from the machines' records."""
    steps = [step for machine in machines for step in machine.steps]
    begun_at = min(step.time - step.seconds for step in steps)
    stalled = [sum(round.stalled_seconds for round in machine.rounds) for machine in machines]
    return WallclockResult(
        row=run.row,
        seed=run.seed,
        settings=run.settings,
        curve=build_curve(machines, begun_at),
        num_steps=max(step.step for step in steps),
        step_seconds=median(step.seconds for step in steps),
        stalled_seconds=mean(stalled),
        sent_bytes=sent,
        load=load,
    )


def build_curve(machines: Sequence[IslandRecords], begun_at: float) -> list[tuple[float, float]]:
    """Return held-out losses by seconds since `begun_at`.

    The loss of the untrained model, which only islands measure, is left out.
    """
    evals = [record for machine in machines for record in machine.evals if record.round > 0]
    curve: list[tuple[float, float]] = []
    for number in sorted({record.round for record in evals}):
        records = [record for record in evals if record.round == number]
        losses = [record.loss for record in records if record.loss is not None]
        if losses:
            curve.append((max(record.time for record in records) - begun_at, mean(losses)))
    return curve


def seconds_to(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the seconds at which the held-out loss reached `loss`, interpolated linearly.

    None if it never did.
    """
    before: tuple[float, float] | None = None
    for seconds, measured in curve:
        if measured <= loss and before is None:
            return seconds
        if measured <= loss and before is not None:
            share = (before[1] - loss) / (before[1] - measured)
            return before[0] + share * (seconds - before[0])
        before = (seconds, measured)
    return None
