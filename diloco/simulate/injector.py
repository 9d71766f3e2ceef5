"""What faults do to the processes of a simulated run, at their moments. Every deed is recorded in faults.jsonl."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from diloco.fault_spec import BOOTSTRAP, Fault, Who
from diloco.faults import FaultRecord, begin, done_path, record_fault
from diloco.fleet import Fleet
from diloco.metrics import RoundRecord, StepRecord
from diloco.processes import Child, kill, signal_all, terminate
from diloco.runfiles import METRICS, Tail
from diloco.storm import TAKES_DOWN


class Progress:
    """How far an island has come, by what it has written."""

    def __init__(self, path: Path) -> None:
        self.round = self.step = self.num_records = 0
        self.records_of_last_life = 0
        """A life that has written nothing yet takes no part."""
        self._tail = Tail(path)

    def read(self) -> None:
        """Take in what is new. An island that has committed round N has begun round N + 1."""
        for record in self._tail.new_records():
            self.num_records += 1
            if isinstance(record, StepRecord):
                self.step = max(self.step, record.step)
            elif isinstance(record, RoundRecord) and record.committed:
                self.round = max(self.round, record.round + 1)

    def has_come_to(self, fault: Fault) -> bool:
        """Whether the fault's round has begun, or its step is made."""
        if fault.step is not None:
            return self.step >= fault.step
        return fault.round is not None and self.num_records > 0 and self.round >= fault.round


class Inflictor:
    """Inflicts faults on a fleet. Call `poll` often."""

    def __init__(self, fleet: Fleet, faults: Sequence[Fault] = (), storm: Iterator[Fault] | None = None) -> None:
        self._fleet = fleet
        self._waiting = [fault for fault in faults if not fault.is_own]
        self._own = [fault for fault in faults if fault.is_own]
        self._storm = storm if storm is not None else iter(())
        self._next = next(self._storm, None)
        self._progress = {index: Progress(self._folder(index) / METRICS) for index in fleet.islands}
        self._first_commit_at: float | None = None
        self._frozen: set[Who] = set()
        self._struck: set[str] = set()
        self._returning: dict[Who, tuple[Fault, float | None]] = {}
        """Who is started again after a fault, and when, once it has ended."""
        self._late: frozenset[int] | None = None
        """Islands that were starting when another finished: the run is over before they come."""
        self._ends: list[tuple[float, Fault, Callable[[], str]]] = []
        """When a fault ends, and what ends it and says so."""

    def poll(self) -> None:
        """Do what has become due."""
        for progress in self._progress.values():
            progress.read()
        now = time.monotonic()
        if self._first_commit_at is None and any(progress.round for progress in self._progress.values()):
            self._first_commit_at = now
        for fault in [fault for fault in self._own if self._has_happened(fault)]:
            self._own.remove(fault)
            self._see(fault)
        self._end_faults(now)
        if self._any_finished():
            return
        for fault in [fault for fault in self._waiting if self._is_due(fault, now)]:
            self._waiting.remove(fault)
            self._inflict(fault)
        if self._next is not None and self._is_due(self._next, now) and self._may_strike(self._next):
            self._inflict(self._next)
            self._next = next(self._storm, None)
        self._bring_back(now)

    def is_over(self) -> bool:
        """Whether nothing is left to wait for: an island that is away when another has finished is not waited for."""
        running = [index for index, child in self._fleet.islands.items() if child.exit_code is None]
        if self._any_finished():
            if self._late is None:
                self._late = frozenset(filter(self._is_starting, running))
            return all(index in self._late or self.is_down(index) for index in running)
        return not running and not any(who != BOOTSTRAP for who in self._returning)

    def is_down(self, index: int) -> bool:
        """Whether the island has ended before the run, ends now, is frozen, or has done nothing since its start."""
        child = self._fleet.islands[index]
        if child.exit_code is not None:
            return child.exit_code != 0
        return child.mark in self._struck or self._is_starting(index) or index in self._frozen

    def was_meant(self, child: Child) -> bool:
        """Whether the child ended because a fault ended it."""
        return child.mark in self._struck

    def _is_starting(self, index: int) -> bool:
        progress = self._progress[index]
        return progress.num_records <= progress.records_of_last_life

    def _is_due(self, fault: Fault, now: float) -> bool:
        if fault.second is not None:
            return self._first_commit_at is not None and now - self._first_commit_at >= fault.second
        named = {name for name in (*fault.who, *fault.others) if name != BOOTSTRAP}
        asked = [progress for index, progress in self._progress.items() if not named or index in named]
        return not fault.has_trigger or any(progress.has_come_to(fault) for progress in asked)

    def _may_strike(self, fault: Fault) -> bool:
        """Whether the storm's next fault finds its victim up, and leaves half of the islands or more up."""
        who = fault.who[0]
        if isinstance(who, str):
            return self._fleet.bootstrap is not None and self._fleet.bootstrap.exit_code is None
        num_down = sum(self.is_down(index) for index in self._fleet.islands)
        is_too_much = fault.kind in TAKES_DOWN and num_down + 1 > len(self._fleet.islands) // 2
        return not self.is_down(who) and not is_too_much

    def _inflict(self, fault: Fault) -> None:
        """Do it now."""
        deeds = {
            "kill": self._kill,
            "freeze": self._freeze,
            "cut": self._cut,
            "slow": self._begin,
            "corrupt": self._begin,
            "join": self._join,
            "leave": self._leave,
        }
        is_process = fault.kind in ("kill", "freeze", "leave")
        child = self._fleet.child(fault.who[0]) if is_process else None
        if is_process and (child is None or child.exit_code is not None):
            self._record(fault, "nothing was done: it is not running")
        else:
            self._record(fault, deeds[fault.kind](fault))

    def _kill(self, fault: Fault) -> str:
        child = self._struck_child(fault)
        kill([child])
        return f"killed {child.name}"

    def _leave(self, fault: Fault) -> str:
        child = self._struck_child(fault)
        terminate(child)
        return f"asked {child.name} to leave"

    def _freeze(self, fault: Fault) -> str:
        return self._frozen_until(fault, time.time(), signal.SIGSTOP)

    def _cut(self, fault: Fault) -> str:
        net, places = self._fleet.net, self._fleet.namespaces
        assert net is not None, "a cut needs a net"
        some = [places[name] for name in fault.who if name in places]
        others = [places[name] for name in fault.others or places.keys() - set(fault.who) if name in places]
        net.cut(some, others)

        def heal() -> str:
            net.heal(some, others)
            return "healed the link"

        self._end_after(fault, heal)
        return f"cut {len(some)} from {len(others)} for {fault.seconds:g} s"

    def _begin(self, fault: Fault) -> str:
        begin(self._folder(fault.who[0]), fault)
        return f"begun by {self._name(fault.who[0])}"

    def _join(self, fault: Fault) -> str:
        index = max(self._fleet.islands) + 1
        self._fleet.add_joiner(index)
        self._progress[index] = Progress(self._folder(index) / METRICS)
        return f"{self._name(index)} joins"

    def _has_happened(self, fault: Fault) -> bool:
        is_there = self._fleet.child(fault.who[0]) is not None
        return is_there and (not fault.has_trigger or done_path(self._folder(fault.who[0]), fault).exists())

    def _see(self, fault: Fault) -> None:
        """Take note of what an island has done to itself, and see to its end."""
        who = fault.who[0]
        if fault.kind == "kill":
            self._struck_child(fault)
        elif fault.kind == "freeze":
            self._frozen_until(fault, done_path(self._folder(who), fault).stat().st_mtime)
        where = f" in phase {fault.phase!r}" if fault.phase else "" if fault.has_trigger else " from the start"
        self._record(fault, f"{self._name(who)} did it{where}")

    def _struck_child(self, fault: Fault) -> Child:
        """The fault's victim; from now on its end is meant, and it comes back if the fault says so."""
        who = fault.who[0]
        child = self._fleet.child(who)
        assert child is not None, f"{who} was never started"
        self._struck.add(child.mark)
        self._frozen.discard(who)
        if fault.back is not None:
            self._returning[who] = fault, None
        return child

    def _frozen_until(self, fault: Fault, since: float, number: signal.Signals | None = None) -> str:
        """Wake the victim when the fault's seconds since that time are over; `number` stops it now."""
        who = fault.who[0]
        child = self._fleet.child(who)
        assert child is not None, f"{who} was never started"
        if number is not None:
            signal_all([child], number)
        self._frozen.add(who)

        def wake() -> str:
            signal_all([child], signal.SIGCONT)
            self._frozen.discard(who)
            return f"woke {child.name}"

        self._end_after(fault, wake, elapsed=time.time() - since)
        return f"froze {child.name} for {fault.seconds:g} s"

    def _end_after(self, fault: Fault, act: Callable[[], str], elapsed: float = 0.0) -> None:
        assert fault.seconds is not None, "it lasts"
        self._ends.append((time.monotonic() + fault.seconds - elapsed, fault, act))

    def _end_faults(self, now: float) -> None:
        for end in [end for end in self._ends if end[0] <= now]:
            self._ends.remove(end)
            self._record(end[1], end[2](), is_end=True)

    def _bring_back(self, now: float) -> None:
        """Start again who has been away for long enough, counted from the end of its processes."""
        for who, (fault, due) in list(self._returning.items()):
            child = self._fleet.child(who)
            assert child is not None and fault.back is not None, "it was started and comes back"
            if due is None and child.exit_code is not None:
                self._returning[who] = fault, now + fault.back
            elif due is not None and due <= now:
                del self._returning[who]
                if isinstance(who, int):
                    self._progress[who].records_of_last_life = self._progress[who].num_records
                self._fleet.restart(who)
                self._record(fault, f"started {child.name} again", is_end=True)

    def _any_finished(self) -> bool:
        return any(child.exit_code == 0 for child in self._fleet.islands.values())

    def _record(self, fault: Fault, text: str, *, is_end: bool = False) -> None:
        names = tuple(self._name(name) for name in (*fault.who, *fault.others))
        record = FaultRecord(spec=str(fault), kind=fault.kind, islands=names, text=text, is_end=is_end)
        record_fault(self._fleet.run_dir, record)

    def _name(self, who: Who) -> str:
        child = self._fleet.child(who)
        return child.name if child else str(who)

    def _folder(self, who: Who) -> Path:
        return self._fleet.run_dir / self._name(who)
