"""The cost of a killed or frozen island for the others, by the records of forked islands."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

from diloco.faults.self_inflicted import request_fault
from diloco.faults.spec import parse_fault
from tests.faults.forked import (
    POLL_SECONDS,
    RecordReader,
    open_forked_swarm,
    process_tree,
    train_at_pace,
)
from tests.swarm import Island, Swarm

NUM_ISLANDS = 4
INNER_STEPS = 12
STEP_SECONDS = 0.1
QUIET_ROUNDS = 3
"""Rounds of all islands between two kills, after the round in which the killed island is back."""
GUARD_SECONDS = 120.0
FREEZE_SECONDS = 20.0
Moment = Literal["any", "reduce"]
"""When an island is killed: at a random moment of a round, or in the reduce, when the first mean
has reached it.
"""


class FaultBenchError(Exception):
    """A figure could not be measured. The other figures are still measured."""


@dataclass
class Timing:
    """Timing of rounds of one kind: `rounds` holds each island's seconds from commit to commit."""

    rounds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Seconds of waiting for the plan."""
    reduces: list[float] = field(default_factory=list)
    """Seconds of connecting and reducing."""
    worst: list[float] = field(default_factory=list)
    """Seconds of the slowest island in each round."""

    def add(self, watches: Sequence[RecordReader], number: int) -> None:
        """Add one round, as recorded by these islands."""
        seconds = [watch.seconds(number) for watch in watches]
        self.worst.append(max(seconds))
        self.rounds += seconds
        self.waits += [watch.commits[number].wait_seconds for watch in watches]
        self.reduces += [watch.commits[number].reduce_seconds for watch in watches]

    @property
    def rest(self) -> float:
        """Median seconds of inner steps, vote and outer step."""
        return median(
            r - w - d for r, w, d in zip(self.rounds, self.waits, self.reduces, strict=True)
        )


@dataclass(frozen=True)
class Stall:
    """Rounds without and with a kill. A stall is the slowest survivor's round minus the median
    quiet round.
    """

    quiet: Timing
    killed: Timing
    num_void: int
    """Number of kills that came too late: their round was committed with the victim."""

    @property
    def stalls(self) -> list[float]:
        return [seconds - median(self.quiet.rounds) for seconds in self.killed.worst]

    @property
    def noise(self) -> list[float]:
        """The same differences for rounds without a kill."""
        return [seconds - median(self.quiet.rounds) for seconds in self.quiet.worst]


class StallBench:
    """Running islands and their records."""

    def __init__(self, made: Swarm) -> None:
        self._made = made
        self.islands: list[Island] = [
            made.start(i, train_at_pace(STEP_SECONDS)) for i in range(NUM_ISLANDS)
        ]
        self.watches = [RecordReader(island) for island in self.islands]

    def restart(self, index: int) -> None:
        """Restart an island that was killed."""
        self.islands[index].wait(10)
        self.islands[index] = self._made.start(index, train_at_pace(STEP_SECONDS))

    def stop_in_reduce(self, index: int, round_number: int) -> None:
        """Wait until the island is stopped in the round's reduce.

        All its processes can then be killed.
        """
        island = self.islands[index]
        request_fault(
            island.folder, parse_fault(f"freeze:{index}@round={round_number},phase=reducing")
        )
        self.until(lambda: island.is_stopped, "the reduce of a round")

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Read the islands' records until `is_so()` is true. Raises FaultBenchError."""
        deadline = time.monotonic() + GUARD_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                logs = "\n".join(island.log[-1000:] for island in self.islands)
                raise FaultBenchError(f"{what} did not happen within {GUARD_SECONDS:.0f} s\n{logs}")
            time.sleep(POLL_SECONDS)
            for watch in self.watches:
                watch.read()

    def is_full(self, number: int) -> bool:
        """Return whether all islands committed the round together."""
        records = [watch.commits.get(number) for watch in self.watches]
        return all(
            record is not None and len(record.participants) == NUM_ISLANDS for record in records
        )

    def next_full(self, after: int) -> int:
        """Wait for the first round later than `after` that all islands commit together, and return
        its number.
        """
        watch = self.watches[0]
        found = [-1]

        def look() -> bool:
            found[:] = [
                number for number in range(after + 1, watch.last + 1) if self.is_full(number)
            ][:1]
            return bool(found)

        self.until(look, "a round of all islands")
        return found[0]


@contextmanager
def open_bench(transport: str) -> Iterator[StallBench]:
    """Start islands and wait until they have measured the rounds that their deadlines depend on."""
    overrides = (f"outer.inner_steps={INNER_STEPS}", "optimizer.tokens_per_step=128")
    with (
        tempfile.TemporaryDirectory(prefix="diloco-faults-") as folder,
        open_forked_swarm(
            Path(folder), transport, [{} for _ in range(NUM_ISLANDS)], *overrides
        ) as (made, _),
    ):
        running = StallBench(made)
        first = running.next_full(-1)
        running.until(lambda: running.is_full(first + 4), "the first rounds")
        yield running


def measure_stall(
    transport: str, kills: int, seed: int, moment: Moment, *, with_daemon: bool
) -> Stall:
    """Kill an island at this moment of a round `kills` times, with or without its libp2p daemon."""
    draw = random.Random(seed)
    result = Stall(Timing(), Timing(), 0)
    num_void = 0
    with open_bench(transport) as running:
        while len(result.killed.worst) < kills:
            returned = running.next_full(max(watch.last for watch in running.watches) - 1)
            last = returned + QUIET_ROUNDS
            running.until(lambda last=last: running.is_full(last), "quiet rounds")
            for number in range(returned + 1, last + 1):
                result.quiet.add(running.watches, number)
            victim = draw.randrange(NUM_ISLANDS)
            if moment == "any":
                time.sleep(draw.uniform(0.05, 0.85) * median(result.quiet.rounds))
            else:
                running.stop_in_reduce(victim, last + 1)
            kill(running.islands[victim], with_daemon=with_daemon)
            survivors = [watch for i, watch in enumerate(running.watches) if i != victim]
            running.until(
                lambda s=survivors, n=last + 1: all(w.last >= n for w in s),
                "the round after a kill",
            )
            if len(survivors[0].commits[last + 1].participants) == NUM_ISLANDS - 1:
                result.killed.add(survivors, last + 1)
            else:
                num_void += 1
            running.restart(victim)
    return Stall(result.quiet, result.killed, num_void)


def kill(island: Island, *, with_daemon: bool) -> None:
    """Kill the island's process, and with `with_daemon` all of its processes, as when a machine is
    lost.
    """
    for pid in process_tree(island.ranks[0]) if with_daemon else [island.ranks[0].pid]:
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Freeze:
    """What freezing one island costs the others, and when the frozen island was back."""

    round_seconds: float
    first_commit: float
    """Seconds from the freeze to the others' next commit."""
    rounds_meanwhile: int
    rounds_until_back: int
    """Number of commits after the island woke, up to the first one that it takes part in."""
    seconds_until_back: float


def measure_freeze(transport: str, seed: int) -> Freeze:
    """Freeze an island and its daemon for FREEZE_SECONDS in the middle of a round."""
    victim = random.Random(seed).randrange(NUM_ISLANDS)
    with open_bench(transport) as running:
        others = [watch for i, watch in enumerate(running.watches) if i != victim]
        name = running.islands[victim].folder.name
        before = running.next_full(others[0].last)
        round_seconds = median(
            others[0].seconds(number) for number in range(before - 2, before + 1)
        )
        time.sleep(round_seconds / 2)
        pids = process_tree(running.islands[victim].ranks[0])
        frozen = signal_all(pids, signal.SIGSTOP)
        running.until(lambda: time.time() >= frozen + FREEZE_SECONDS, "the time of the freeze")
        last = max(watch.last for watch in others)
        woken = signal_all(pids, signal.SIGCONT)

        def back() -> list[int]:
            return [n for n, r in others[0].commits.items() if n > last and name in r.participants]

        running.until(lambda: bool(back()), "a round with the woken island")
        first = min(
            record.time
            for watch in others
            for record in watch.commits.values()
            if record.time > frozen
        )
        number = min(back())
        return Freeze(
            round_seconds=round_seconds,
            first_commit=first - frozen,
            rounds_meanwhile=last - before,
            rounds_until_back=number - last,
            seconds_until_back=others[0].commits[number].time - woken,
        )


def signal_all(pids: Sequence[int], number: signal.Signals) -> float:
    """Send a signal to all pids. Returns the unix time afterwards."""
    for pid in pids:
        os.kill(pid, number)
    return time.time()
