"""A storm over forked islands: inject the shipped tool's seeded faults and summarise the run's
records.
"""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from diloco.faults.self_inflicted import request_fault
from diloco.faults.spec import BOOTSTRAP, Fault, Target
from diloco.faults.storm import TAKES_DOWN, storm
from diloco.records.faults import FaultRecord, record_fault
from diloco.report.summary import Summary, summarise
from diloco.runtime.processes import kill
from diloco.simulate.fleet import Fleet
from tests.faults.forked import POLL_SECONDS, RecordReader, is_up, open_forked_swarm, train_at_pace
from tests.faults.leftovers import nothing_left
from tests.swarm import Island, Swarm

INNER_STEPS = 8
CALM_ROUNDS = 3
"""Rounds one after another, after the last fault, in which all islands make all inner steps."""
GUARD_SECONDS = 120.0


@dataclass(frozen=True)
class StormSettings:
    """Settings of a storm. `rate` is in faults per island and minute."""

    transport: str
    num_islands: int
    num_faults: int
    rate: float
    seed: int = 0
    shapes: tuple[dict[str, Any], ...] = ()
    """Settings of the last islands; those before have one rank."""
    step_seconds: float = 0.08
    """Duration of an inner step. Islands that cannot keep it up are not waited for, and no round is
    whole then.
    """

    @property
    def islands(self) -> list[dict[str, Any]]:
        return [*({} for _ in range(self.num_islands - len(self.shapes))), *self.shapes]


@dataclass(frozen=True)
class StormOutcome:
    """The outcome of a storm, from the run's records."""

    summary: Summary
    seconds: float


def run_storm(setting: StormSettings, folder: Path) -> StormOutcome:
    """Run a storm and CALM_ROUNDS more rounds in `folder`. Raises AssertionError if an island
    hangs.
    """
    overrides = (f"outer.inner_steps={INNER_STEPS}", "optimizer.tokens_per_step=128")
    with (
        nothing_left(),
        open_forked_swarm(folder, setting.transport, setting.islands, *overrides) as (made, fleet),
    ):
        passing = StormRunner(made, fleet, setting)
        started = time.monotonic()
        passing.until_over()
        passing.until_calm()
        passing.end_run()
        return StormOutcome(summarise(passing.run_dir), time.monotonic() - started)


class StormRunner:
    """The islands, those that are down or frozen, and the faults still to come."""

    def __init__(self, made: Swarm, fleet: Fleet, setting: StormSettings) -> None:
        self._made, self._fleet = made, fleet
        self.run_dir = made.folder / made.config.name
        self._pace = train_at_pace(setting.step_seconds)
        self._islands: dict[int, Island] = {i: self._start(i) for i in range(setting.num_islands)}
        self._watches = [RecordReader(island) for island in self._islands.values()]
        self._awake_from: dict[int, float] = {}
        """Time at which a frozen island is woken."""
        self._back_from: dict[Target, float] = {}
        """Time at which a killed or departed target is restarted."""
        self._steps_before: dict[int, int] = {}
        """Number of inner steps of an island before its last restart."""
        self._faults: Iterator[Fault] = islice(
            storm(setting.seed, setting.rate, setting.num_islands), setting.num_faults
        )

    def until_over(self) -> None:
        """Inject all faults, each as soon as it is due and its target is up."""
        self._until(lambda: min(watch.last for watch in self._watches) >= 0, "the first round")
        began = time.monotonic()
        for fault in self._faults:
            self._until(
                lambda f=fault: time.monotonic() - began >= (f.second or 0) and self._may_strike(f),
                str(fault),
            )
            self._strike(fault)
        self._until(lambda: not self._awake_from and not self._back_from, "the end of all faults")

    def until_calm(self) -> None:
        """Wait for CALM_ROUNDS. An island that has just come back, or is slowed down, makes fewer
        inner steps.
        """
        start = max(watch.last for watch in self._watches) + 1

        def is_calm() -> bool:
            last = min(watch.last for watch in self._watches)
            return last - CALM_ROUNDS + 1 >= start and all(
                self._is_full(number) for number in range(last - CALM_ROUNDS + 1, last + 1)
            )

        self._until(is_calm, "rounds with all inner steps of all islands")

    def end_run(self) -> None:
        """Make all islands leave right after a commit."""
        last = max(watch.last for watch in self._watches)
        self._until(lambda: min(watch.last for watch in self._watches) > last, "one more round")
        for island in self._islands.values():
            island.signal(signal.SIGTERM)
        for island in self._islands.values():
            island.wait(GUARD_SECONDS)

    # -- faults ------------------------------------------------------------------------------------

    def _may_strike(self, fault: Fault) -> bool:
        """Whether the target is up, and at least half of the islands stay up after the fault."""
        target = fault.targets[0]
        if isinstance(target, str):
            return BOOTSTRAP not in self._back_from
        num_down = sum(self._is_down(index) for index in self._islands)
        is_too_much = fault.kind in TAKES_DOWN and num_down + 1 > len(self._islands) // 2
        return not self._is_down(target) and not is_too_much

    def _is_down(self, index: int) -> bool:
        is_starting = self._watches[index].num_steps <= self._steps_before.get(index, 0)
        return index in self._back_from or index in self._awake_from or is_starting

    def _strike(self, fault: Fault) -> None:
        target, now = fault.targets[0], time.monotonic()
        names = tuple(f"island-{name}" if isinstance(name, int) else name for name in fault.targets)
        record_fault(
            self.run_dir,
            FaultRecord(spec=str(fault), kind=fault.kind, islands=names, text=str(fault)),
        )
        if isinstance(target, str):
            kill([self._fleet.services[BOOTSTRAP]])
            self._back_from[target] = now + (fault.back or 0)
        elif fault.kind in ("kill", "leave"):
            self._islands[target].signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            self._back_from[target] = now + (fault.back or 0)
        elif fault.kind == "freeze":
            self._islands[target].signal(signal.SIGSTOP)
            self._awake_from[target] = now + (fault.seconds or 0)
        else:
            request_fault(self._islands[target].folder, fault)

    def _end_faults(self) -> None:
        now = time.monotonic()
        for index in [index for index, due in self._awake_from.items() if due <= now]:
            del self._awake_from[index]
            self._islands[index].signal(signal.SIGCONT)
        for target, due in list(self._back_from.items()):
            if due > now or (isinstance(target, int) and is_up(self._islands[target])):
                # It is not due yet, or its process is still ending.
                continue
            if isinstance(target, str):
                self._fleet.restart(target)
            else:
                self._steps_before[target] = self._watches[target].num_steps
                self._islands[target] = self._start(target)
            del self._back_from[target]

    # -- the islands -------------------------------------------------------------------------------

    def _start(self, index: int) -> Island:
        return self._made.start(index, self._pace)

    def _is_full(self, number: int) -> bool:
        records = [watch.commits.get(number) for watch in self._watches]
        return all(
            record is not None
            and len(record.participants) == len(records)
            and record.steps == INNER_STEPS
            for record in records
        )

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        """End faults and read records until `is_so()` is true."""
        deadline = time.monotonic() + GUARD_SECONDS
        while not is_so():
            self._end_faults()
            self._check_alive()
            assert time.monotonic() < deadline, f"{what} did not come:\n{self._logs()}"
            time.sleep(POLL_SECONDS)
            for watch in self._watches:
                watch.read()

    def _check_alive(self) -> None:
        """Fail if an island has ended without a fault."""
        for index, island in self._islands.items():
            assert index in self._back_from or is_up(island), (
                f"island {index} has ended:\n{island.log[-4000:]}"
            )

    def _logs(self) -> str:
        states = {
            i: (w.last, i in self._awake_from, i in self._back_from)
            for i, w in enumerate(self._watches)
        }
        return "\n".join([str(states), *(island.log[-2500:] for island in self._islands.values())])
