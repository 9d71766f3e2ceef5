"""Run the missing runs of an experiment, one per core at the same time, each in its own process.

A run is `diloco islands`: all islands are threads of one process, and one of them computes at a
time. It saves checkpoints, so the run can resume after this process, the run or the machine is
killed.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from diloco.experiments.definition.rows import Run
from diloco.experiments.folder import ExperimentFolder, metrics_of, remove_checkpoints
from diloco.experiments.forecast import Forecast, wall_seconds
from diloco.experiments.results.run_result import measure_run, write_result
from diloco.formatting import human_loss, human_seconds
from diloco.records.metrics import StepRecord
from diloco.records.run_folder import Tail
from diloco.runtime.processes import Child, start, stop
from diloco.simulate.dashboard import print_failure
from diloco.simulate.in_process import LOG, ONE_ARENA
from inner.errors import InputError

POLL_SECONDS = 0.2
LINE_SECONDS = 60.0
"""Seconds between two prints of the state where no terminal shows it."""
STALL_SECONDS = 3600.0
"""A run that records nothing for this time is ended. Its next start resumes from its last
checkpoint."""


@dataclass
class ActiveRun:
    """A run in progress."""

    run: Run
    folder: Path
    child: Child
    tail: Tail
    steps: int = 0
    """Inner steps of the run that its first island has made."""
    steps_made: int = 0
    """The inner steps that this process has made, without those of earlier processes."""
    core_seconds: float = 0.0
    last_record_at: float = field(default_factory=time.monotonic)

    def poll(self) -> None:
        """Read the run's new records. Must be called before `exit_code`, which frees the process's
        times.
        """
        self.core_seconds = max(self.core_seconds, read_core_seconds(self.child.process.pid) or 0.0)
        records = self.tail.new_records()
        steps = [record.step for record in records if isinstance(record, StepRecord)]
        self.steps = steps[-1] if steps else self.steps
        self.steps_made += len(steps)
        if records:
            self.last_record_at = time.monotonic()

    @property
    def share(self) -> float:
        """Share of the run that is done."""
        return self.steps / self.run.config.total_steps


class RunPool:
    """Works through runs in order. A failed run is left out, and the next command tries it
    again.
    """

    def __init__(
        self, folder: ExperimentFolder, runs: Sequence[Run], at_once: int, console: Console
    ) -> None:
        self.folder = folder
        self.waiting = list(runs)
        self.at_once = at_once
        self.console = console
        self.active: list[ActiveRun] = []
        self.failed: list[Run] = []
        self.num_done = 0

    def work(self, expected: Forecast, on_finished: Callable[[Run], None]) -> None:
        """Run all runs. `on_finished` is called after each success. No process is left, even after
        an exception.
        """
        line_at = time.monotonic()
        try:
            with self.console.status("") as status:
                while self.waiting or self.active:
                    while self.waiting and len(self.active) < self.at_once:
                        self.active.append(self._start(self.waiting.pop(0)))
                    for active in list(self.active):
                        self._attend(active, on_finished)
                    text = self.describe(expected)
                    status.update(text)
                    if not self.console.is_terminal and time.monotonic() > line_at + LINE_SECONDS:
                        line_at = time.monotonic()
                        self.console.print(text, soft_wrap=True)
                    time.sleep(POLL_SECONDS)
        finally:
            stop([active.child for active in self.active])

    def describe(self, expected: Forecast) -> str:
        """Return the state as one line of text."""
        now = ", ".join(f"{active.run.label}: {active.share:.0%}" for active in self.active)
        seconds = wall_seconds(self.waiting, expected, self.at_once)
        seconds += max(
            (self._seconds_left(active, expected) for active in self.active), default=0.0
        )
        return (
            f"{self.num_done} done, {len(self.waiting)} waiting, about "
            f"{human_seconds(seconds)} left; {now}"
        )

    def _start(self, run: Run) -> ActiveRun:
        folder = self.folder.create(run)
        command = [
            sys.executable,
            "-m",
            "diloco",
            "islands",
            str(folder / "config.yaml"),
            "--processors",
            "1",
        ]
        # The experiment's folder may have been moved since the run's folder was created.
        child = start(
            run.label, [*command, f"island.run_dir={folder.parent}"], folder / LOG, ONE_ARENA
        )
        tail = Tail(metrics_of(folder, run))
        before = [record.step for record in tail.new_records() if isinstance(record, StepRecord)]
        text = f" resumes, stopped after inner step {before[-1]}" if before else " begins"
        self.console.print(run.label + text, soft_wrap=True, highlight=False)
        return ActiveRun(run, folder, child, tail, steps=before[-1] if before else 0)

    def _attend(self, active: ActiveRun, on_finished: Callable[[Run], None]) -> None:
        """Check a run, and remove it from the active runs if it is over."""
        active.poll()
        exit_code = active.child.exit_code
        if exit_code is None and time.monotonic() > active.last_record_at + STALL_SECONDS:
            self.console.print(
                f"{active.run.label}: nothing was recorded for {STALL_SECONDS:.0f} s; the run is "
                "stopped"
            )
            stop([active.child])
            exit_code = active.child.exit_code or 1
        if exit_code is None:
            return
        active.poll()
        self.active.remove(active)
        if exit_code == 0 and self._finish(active):
            self.num_done += 1
            on_finished(active.run)
            return
        self.failed.append(active.run)
        if exit_code:
            print_failure(active.child, self.console)

    def _finish(self, active: ActiveRun) -> bool:
        """Keep the result of a run that has ended. Return whether it has a result."""
        times = {"core_seconds": active.core_seconds, "steps_timed": active.steps_made}
        try:
            result = measure_run(active.folder, active.run, **times)
        except InputError as error:
            self.console.print(f"{active.run.label}: {error}", soft_wrap=True)
            return False
        write_result(active.folder, result)
        loss = human_loss(result.loss)
        seconds = human_seconds(active.core_seconds)
        text = f"{active.run.label}: held-out loss {loss}, {seconds} of a core"
        self.console.print(text, soft_wrap=True, highlight=False)
        return True

    def _seconds_left(self, active: ActiveRun, expected: Forecast) -> float:
        return expected.core_seconds[active.run.row.row_id] * (1 - active.share)


def read_core_seconds(pid: int) -> float | None:
    """Return the processor time of a process that has not been waited for; None where the system
    does not report it.
    """
    with suppress(OSError, IndexError, ValueError):
        # The name, in brackets, may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def clean(folder: ExperimentFolder, run: Run, *, keeps_one: bool) -> None:
    """Delete checkpoints that a finished run no longer needs."""
    if (found := folder.find(run)) is not None:
        remove_checkpoints(found, run, keeps_one=keeps_one)
