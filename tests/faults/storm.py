"""A storm over forked islands: the shipped tool's seeded faults in turn, and what the run's records say of it."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from diloco.fault_spec import BOOTSTRAP, Fault, Who
from diloco.faults import FaultRecord, begin, record_fault
from diloco.fleet import Fleet
from diloco.processes import kill
from diloco.storm import TAKES_DOWN, storm
from diloco.summary import Summary, summarise
from tests.faults.forked import POLL_SECONDS, Watch, forked, is_up, paced
from tests.swarm import Island, Swarm

INNER_STEPS = 8
STEP_SECONDS = 0.08
CALM_ROUNDS = 3
"""Whole rounds of all islands after the last fault."""
GUARD_SECONDS = 120.0


@dataclass(frozen=True)
class Setting:
    """A storm to be: `rate` faults an island and minute."""

    transport: str
    num_islands: int
    num_faults: int
    rate: float
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What the run's records say of the storm."""

    summary: Summary
    calm_steps: set[int]
    """Inner steps that islands made in the rounds after the storm."""
    seconds: float


def run_storm(setting: Setting, folder: Path) -> Outcome:
    """Let the storm pass over a run in `folder`, and CALM_ROUNDS more rounds; AssertionError when somebody hangs."""
    overrides = (f"outer.inner_steps={INNER_STEPS}", "optimizer.tokens_per_step=128")
    with forked(folder, setting.transport, setting.num_islands, *overrides) as (made, fleet):
        passing = Storm(made, fleet, setting)
        started = time.monotonic()
        passing.until_over()
        calm = passing.until_calm()
        passing.end_run()
        return Outcome(summarise(passing.run_dir), calm, time.monotonic() - started)


class Storm:
    """The islands, who is away or frozen, and the faults to come."""

    def __init__(self, made: Swarm, fleet: Fleet, setting: Setting) -> None:
        self._made, self._fleet = made, fleet
        self.run_dir = made.folder / made.config.name
        self._islands: dict[int, Island] = {i: self._start(i) for i in range(setting.num_islands)}
        self._watches = [Watch(island) for island in self._islands.values()]
        self._awake_from: dict[int, float] = {}
        """When a frozen island is woken."""
        self._back_from: dict[Who, float] = {}
        """When one that was killed or left is started again."""
        self._steps_before: dict[int, int] = {}
        """Inner steps of an island when it was started last."""
        self._faults: Iterator[Fault] = islice(
            storm(setting.seed, setting.rate, setting.num_islands), setting.num_faults
        )

    def until_over(self) -> None:
        """Inflict all faults, each as soon as its time has come and its victim is up."""
        self._until(lambda: min(watch.last for watch in self._watches) >= 0, "the first round")
        began = time.monotonic()
        for fault in self._faults:
            self._until(lambda f=fault: time.monotonic() - began >= (f.second or 0) and self._may_strike(f), str(fault))
            self._strike(fault)
        self._until(lambda: not self._awake_from and not self._back_from, "the end of all faults")

    def until_calm(self) -> set[int]:
        """Wait for CALM_ROUNDS after the first round of all; the inner steps that islands made in them."""
        start = max(watch.last for watch in self._watches) + 1
        calm: list[int] = []

        def look() -> bool:
            calm[:] = [n for n in range(start, max(w.last for w in self._watches) + 1) if self._is_full(n)]
            return len(calm) > CALM_ROUNDS

        self._until(look, "a round of all islands")
        return {watch.commits[number].steps for watch in self._watches for number in calm[1:]}

    def end_run(self) -> None:
        """Have all islands leave, right after a commit."""
        last = max(watch.last for watch in self._watches)
        self._until(lambda: min(watch.last for watch in self._watches) > last, "one more round")
        for island in self._islands.values():
            island.signal(signal.SIGTERM)
        for island in self._islands.values():
            island.wait(30)

    # -- faults -------------------------------------------------------------------------------------------------

    def _may_strike(self, fault: Fault) -> bool:
        """Whether the victim is up, and half of the islands or more stay so."""
        who = fault.who[0]
        if isinstance(who, str):
            return BOOTSTRAP not in self._back_from
        num_down = sum(self._is_down(index) for index in self._islands)
        is_too_much = fault.kind in TAKES_DOWN and num_down + 1 > len(self._islands) // 2
        return not self._is_down(who) and not is_too_much

    def _is_down(self, index: int) -> bool:
        is_starting = self._watches[index].num_steps <= self._steps_before.get(index, 0)
        return index in self._back_from or index in self._awake_from or is_starting

    def _strike(self, fault: Fault) -> None:
        who, now = fault.who[0], time.monotonic()
        names = tuple(f"island-{name}" if isinstance(name, int) else name for name in fault.who)
        record_fault(self.run_dir, FaultRecord(spec=str(fault), kind=fault.kind, islands=names, text=str(fault)))
        if isinstance(who, str):
            assert self._fleet.bootstrap is not None, "a swarm has a bootstrap process"
            kill([self._fleet.bootstrap])
            self._back_from[who] = now + (fault.back or 0)
        elif fault.kind in ("kill", "leave"):
            self._islands[who].signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            self._back_from[who] = now + (fault.back or 0)
        elif fault.kind == "freeze":
            self._islands[who].signal(signal.SIGSTOP)
            self._awake_from[who] = now + (fault.seconds or 0)
        else:
            begin(self._islands[who].folder, fault)

    def _end_faults(self) -> None:
        now = time.monotonic()
        for index in [index for index, due in self._awake_from.items() if due <= now]:
            del self._awake_from[index]
            self._islands[index].signal(signal.SIGCONT)
        for who, due in list(self._back_from.items()):
            if due > now or (isinstance(who, int) and is_up(self._islands[who])):
                continue  # it is away, or still leaving
            if isinstance(who, str):
                self._fleet.restart(who)
            else:
                self._steps_before[who] = self._watches[who].num_steps
                self._islands[who] = self._start(who)
            del self._back_from[who]

    # -- the islands --------------------------------------------------------------------------------------------

    def _start(self, index: int) -> Island:
        return self._made.start(index, paced(STEP_SECONDS))

    def _is_full(self, number: int) -> bool:
        records = [watch.commits.get(number) for watch in self._watches]
        return all(record is not None and len(record.participants) == len(records) for record in records)

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        """End faults that are over, and read what islands record, until it is so."""
        deadline = time.monotonic() + GUARD_SECONDS
        while not is_so():
            self._end_faults()
            self._check_alive()
            assert time.monotonic() < deadline, f"{what} did not come:\n{self._logs()}"
            time.sleep(POLL_SECONDS)
            for watch in self._watches:
                watch.read()

    def _check_alive(self) -> None:
        """Nobody ends but by a fault."""
        for index, island in self._islands.items():
            assert index in self._back_from or is_up(island), f"island {index} has ended:\n{island.log[-4000:]}"

    def _logs(self) -> str:
        states = {i: (w.last, i in self._awake_from, i in self._back_from) for i, w in enumerate(self._watches)}
        return "\n".join([str(states), *(island.log[-2500:] for island in self._islands.values())])
