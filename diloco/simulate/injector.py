"""Inject faults into the processes of a simulated run. Every injection is recorded in
faults.jsonl.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from diloco.faults.self_inflicted import done_path, request_fault
from diloco.faults.spec import Fault, Target
from diloco.faults.storm import TAKES_DOWN
from diloco.network_emulation.nat import forget_connections
from diloco.records.faults import FaultRecord, record_fault
from diloco.records.metrics import RoundRecord, StepRecord
from diloco.records.run_folder import METRICS, Tail
from diloco.runtime.processes import Child, find_process, kill, signal_all, terminate
from diloco.simulate.fleet import Fleet


class RoundProgress:
    """The progress of an island according to its metrics."""

    def __init__(self, path: Path) -> None:
        self.round = self.step = self.num_records = 0
        self.num_records_before_start = 0
        """Number of records from before the last restart. The island counts as starting until it
        writes a new record."""
        self._tail = Tail(path)

    def read(self) -> None:
        """Read new records. An island that has committed round N has begun round N + 1."""
        for record in self._tail.new_records():
            self.num_records += 1
            if isinstance(record, StepRecord):
                self.step = max(self.step, record.step)
            elif isinstance(record, RoundRecord) and record.committed:
                self.round = max(self.round, record.round + 1)

    def has_reached(self, fault: Fault) -> bool:
        """Return whether the island has begun the fault's round, or made the fault's step."""
        if fault.step is not None:
            return self.step >= fault.step
        return fault.round is not None and self.num_records > 0 and self.round >= fault.round


class FaultInjector:
    """Injects faults into a fleet. Call `poll` often."""

    def __init__(
        self, fleet: Fleet, faults: Sequence[Fault] = (), storm: Iterator[Fault] | None = None
    ) -> None:
        self._fleet = fleet
        self._pending = [fault for fault in faults if not fault.is_self_inflicted]
        self._self_inflicted = [fault for fault in faults if fault.is_self_inflicted]
        self._storm = storm if storm is not None else iter(())
        self._next_of_storm = next(self._storm, None)
        self._progress = {
            index: RoundProgress(self._folder(index) / METRICS) for index in fleet.islands
        }
        self._first_commit_at: float | None = None
        self._frozen: set[Target] = set()
        self._ended_by_fault: set[str] = set()
        self._restarts: dict[Target, tuple[Fault, float | None]] = {}
        """For each target, the fault after which it is restarted, and the time; None while the
        target is still ending."""
        self._too_late: frozenset[int] | None = None
        """Islands that were still starting when another island finished. The run is over before
        they can join it."""
        self._scheduled_ends: list[tuple[float, Fault, Callable[[], str]]] = []
        """The time at which a fault ends, the fault, and a function that ends it and returns a
        description."""

    def poll(self) -> None:
        """Inject every fault that is due, and end or undo every fault whose time is over."""
        for progress in self._progress.values():
            progress.read()
        now = time.monotonic()
        if self._first_commit_at is None and any(
            progress.round for progress in self._progress.values()
        ):
            self._first_commit_at = now
        for fault in [fault for fault in self._self_inflicted if self._has_happened(fault)]:
            self._self_inflicted.remove(fault)
            self._follow_up(fault)
        self._end_faults(now)
        if self._any_finished():
            return
        for fault in [fault for fault in self._pending if self._is_due(fault, now)]:
            self._pending.remove(fault)
            self._inject(fault)
        if (
            self._next_of_storm is not None
            and self._is_due(self._next_of_storm, now)
            and self._may_strike(self._next_of_storm)
        ):
            self._inject(self._next_of_storm)
            self._next_of_storm = next(self._storm, None)
        self._restart_due(now)

    def is_over(self) -> bool:
        """Return whether the run is over. Once one island has finished, islands that are down are
        not waited for.
        """
        running = [index for index, child in self._fleet.islands.items() if child.exit_code is None]
        if self._any_finished():
            if self._too_late is None:
                self._too_late = frozenset(filter(self._is_starting, running))
            return all(index in self._too_late or self.is_down(index) for index in running)
        return not running and not any(isinstance(target, int) for target in self._restarts)

    def is_down(self, index: int) -> bool:
        """Return whether the island takes no part at present: it failed, is being ended, is frozen,
        or is still starting.
        """
        child = self._fleet.islands[index]
        if child.exit_code is not None:
            return child.exit_code != 0
        return (
            child.mark in self._ended_by_fault or self._is_starting(index) or index in self._frozen
        )

    def ended_by_fault(self, child: Child) -> bool:
        """Return whether a fault has ended, or is ending, the child."""
        return child.mark in self._ended_by_fault

    def _is_starting(self, index: int) -> bool:
        progress = self._progress[index]
        return progress.num_records <= progress.num_records_before_start

    def _is_due(self, fault: Fault, now: float) -> bool:
        if fault.second is not None:
            return self._first_commit_at is not None and now - self._first_commit_at >= fault.second
        named = {name for name in (*fault.targets, *fault.other_side) if isinstance(name, int)}
        asked = [
            progress for index, progress in self._progress.items() if not named or index in named
        ]
        return not fault.has_trigger or any(progress.has_reached(fault) for progress in asked)

    def _may_strike(self, fault: Fault) -> bool:
        """Return whether the target of the storm's next fault is up, and at least half of the
        islands stay up after it.
        """
        target = fault.targets[0]
        if isinstance(target, str):
            return (service := self._fleet.child(target)) is not None and service.exit_code is None
        num_down = sum(self.is_down(index) for index in self._fleet.islands)
        is_too_much = fault.kind in TAKES_DOWN and num_down + 1 > len(self._fleet.islands) // 2
        return not self.is_down(target) and not is_too_much

    def _inject(self, fault: Fault) -> None:
        actions = {
            "kill": self._kill,
            "freeze": self._freeze,
            "cut": self._cut,
            "slow": self._request,
            "corrupt": self._request,
            "join": self._join,
            "leave": self._leave,
            "forget": self._forget,
        }
        is_process = fault.kind in ("kill", "freeze", "leave")
        child = self._fleet.child(fault.targets[0]) if is_process else None
        if is_process and (child is None or child.exit_code is not None):
            self._record(fault, "nothing was done: it is not running")
        else:
            self._record(fault, actions[fault.kind](fault))

    def _kill(self, fault: Fault) -> str:
        if fault.part is not None and not self._find_process(fault):
            return f"nothing was done: {fault.part} is not running"
        children = [self._mark_as_ending(fault, target) for target in fault.targets]
        names = ", ".join(child.name for child in children)
        if fault.part is None:
            kill(children)
            return f"killed {names}"
        # Only this process is killed. The island's other processes must detect the loss themselves.
        self._signal(fault, signal.SIGKILL)
        return f"killed {fault.part} of {names}"

    def _leave(self, fault: Fault) -> str:
        child = self._mark_as_ending(fault, fault.targets[0])
        terminate(child)
        return f"asked {child.name} to leave"

    def _freeze(self, fault: Fault) -> str:
        return self._schedule_wake_up(fault, time.time(), signal.SIGSTOP)

    def _cut(self, fault: Fault) -> str:
        net = self._fleet.net
        namespaces = self._fleet.namespaces
        assert net is not None, "a cut needs an emulated network"
        if fault.node is not None:
            nodes = self._fleet.sites[fault.targets[0]].nodes
            some = [nodes[fault.node]]
            others = [node for node in nodes if node != nodes[fault.node]]
        else:
            other_side = fault.other_side or namespaces.keys() - set(fault.targets)
            some, others = (
                [namespaces[t] for t in side if t in namespaces]
                for side in (fault.targets, other_side)
            )
        net.cut(some, others)

        def heal() -> str:
            net.heal(some, others)
            return "healed the link"

        self._schedule_end(fault, heal)
        return f"cut {len(some)} from {len(others)} for {fault.seconds:g} s"

    def _forget(self, fault: Fault) -> str:
        forget_connections(self._fleet.namespaces[fault.targets[0]])
        return f"the NAT of {self._name(fault.targets[0])} has forgotten its connections"

    def _request(self, fault: Fault) -> str:
        request_fault(self._folder(fault.targets[0]), fault)
        return f"begun by {self._name(fault.targets[0])}"

    def _join(self, fault: Fault) -> str:
        index = max(self._fleet.islands) + 1
        self._fleet.add_joiner(index)
        self._progress[index] = RoundProgress(self._folder(index) / METRICS)
        return f"{self._name(index)} joins"

    def _has_happened(self, fault: Fault) -> bool:
        is_there = self._fleet.child(fault.targets[0]) is not None
        return is_there and (
            not fault.has_trigger or done_path(self._folder(fault.targets[0]), fault).exists()
        )

    def _follow_up(self, fault: Fault) -> None:
        """Record a fault that an island has injected into itself, and schedule its restart or
        wake-up.
        """
        target = fault.targets[0]
        if fault.kind == "kill":
            self._mark_as_ending(fault, target)
        elif fault.kind == "freeze":
            self._schedule_wake_up(fault, done_path(self._folder(target), fault).stat().st_mtime)
        where = (
            f" in phase {fault.phase!r}"
            if fault.phase
            else ""
            if fault.has_trigger
            else " from the start"
        )
        self._record(fault, f"{self._name(target)} did it{where}")

    def _started_child(self, target: Target) -> Child:
        child = self._fleet.child(target)
        assert child is not None, f"{target} was never started"
        return child

    def _mark_as_ending(self, fault: Fault, target: Target) -> Child:
        """Mark a target's process as ended by the fault, schedule its restart if it comes back, and
        return it.
        """
        child = self._started_child(target)
        self._ended_by_fault.add(child.mark)
        self._frozen.discard(target)
        if fault.back is not None:
            self._restarts[target] = fault, None
        return child

    def _schedule_wake_up(
        self, fault: Fault, since: float, number: signal.Signals | None = None
    ) -> str:
        """Schedule the wake-up of the target at `since` (unix time) plus the fault's seconds. Send
        it `number` first.
        """
        target = fault.targets[0]
        child = self._started_child(target)
        if number is not None:
            self._signal(fault, number)
        self._frozen.add(target)

        def wake() -> str:
            signal_all([child], signal.SIGCONT)
            self._frozen.discard(target)
            return f"woke {child.name}"

        self._schedule_end(fault, wake, elapsed=time.time() - since)
        return (
            f"froze {f'{fault.part} of ' if fault.part else ''}{child.name} for {fault.seconds:g} s"
        )

    def _find_process(self, fault: Fault) -> set[int]:
        assert fault.part is not None, "the fault hits a part of an island"
        return find_process(self._started_child(fault.targets[0]), fault.part)

    def _signal(self, fault: Fault, number: signal.Signals) -> None:
        """Send a signal to the processes that the fault names, or to all processes of the
        target.
        """
        if fault.part is None:
            signal_all([self._started_child(fault.targets[0])], number)
        for pid in self._find_process(fault) if fault.part is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _schedule_end(self, fault: Fault, end: Callable[[], str], elapsed: float = 0.0) -> None:
        assert fault.seconds is not None, "the fault has a duration"
        self._scheduled_ends.append((time.monotonic() + fault.seconds - elapsed, fault, end))

    def _end_faults(self, now: float) -> None:
        for scheduled in [scheduled for scheduled in self._scheduled_ends if scheduled[0] <= now]:
            self._scheduled_ends.remove(scheduled)
            _, fault, end = scheduled
            self._record(fault, end(), is_end=True)

    def _restart_due(self, now: float) -> None:
        """Restart each target whose time is over. The time begins when the target's processes have
        ended.
        """
        for target, (fault, due) in list(self._restarts.items()):
            child = self._started_child(target)
            assert fault.back is not None, "only faults with `back` are followed by a restart"
            if due is None and child.exit_code is not None:
                self._restarts[target] = fault, now + fault.back
            elif due is not None and due <= now:
                del self._restarts[target]
                if isinstance(target, int):
                    self._progress[target].num_records_before_start = self._progress[
                        target
                    ].num_records
                self._fleet.restart(target)
                self._record(fault, f"started {child.name} again", is_end=True)

    def _any_finished(self) -> bool:
        return any(child.exit_code == 0 for child in self._fleet.islands.values())

    def _record(self, fault: Fault, text: str, *, is_end: bool = False) -> None:
        names = tuple(self._name(name) for name in (*fault.targets, *fault.other_side))
        record = FaultRecord(
            spec=str(fault), kind=fault.kind, islands=names, text=text, is_end=is_end
        )
        record_fault(self._fleet.run_dir, record)

    def _name(self, target: Target) -> str:
        child = self._fleet.child(target)
        return child.name if child else str(target)

    def _folder(self, target: Target) -> Path:
        return self._fleet.run_dir / self._name(target)
