"""Ends an island in which a rank hangs, after every rank has dumped its state.

Each rank has a Watchdog: a thread that watches the rank's ActivityMonitor. When a piece of work
exceeds its limit, the watchdog raises an alarm in the store where the ranks meet. All ranks then
write the Python stacks of all threads and torch's flight recorder to ISLAND_DIR/hang-<rank>.txt.
They compare their states, one of them reports the verdict, and each process exits with status HUNG,
so that the island is started again.
"""

import faulthandler
import json
import linecache
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from diloco.watchdog.activity import ActivityMonitor
from diloco.watchdog.hang_verdict import RankState, from_values, group_states, reads_tensor, verdict
from diloco.watchdog.signals import end_after
from outer.network.retry import retry_blocking

log = logging.getLogger(__name__)

HUNG = 85
"""Exit status of a rank that its watchdog has ended."""
POLL_SECONDS = 1.0
STOPPED_SECONDS = 0.5
"""A watching thread that is this late was stopped with its process: suspended, or without any
processor.
"""
ANSWER_SECONDS = 20.0
"""How long ranks wait for one another's states, and then for the report of the verdict."""
WRITE_SECONDS = 5.0
"""How long the rank that reports the verdict waits for the others to write it."""
END_SECONDS = 2 * ANSWER_SECONDS + 5.0
"""Longest time from the alarm to the end of the process, even if no other rank answers."""


@dataclass(frozen=True)
class WatchedRank:
    """A rank of an island, and where its hang is reported."""

    rank: int
    num_ranks: int
    folder: Path
    report: Callable[[str], None]
    """Called with the verdict, only on the first rank that can answer."""


class Watchdog:
    """A context manager around the training on every rank. The default process group must exist."""

    def __init__(self, activity: ActivityMonitor, watched: WatchedRank) -> None:
        self._activity = activity
        self._watched = watched
        # A separate connection, because another thread may be waiting on torch's own.
        self._store = dist.PrefixStore("hang", dist.distributed_c10d._get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._training_thread = threading.get_ident()
        self._is_over = threading.Event()
        self._is_ending = threading.Event()
        self._idle_seconds = 0.0
        self._alarm: str | None = None
        """The cause of the alarm that another rank has raised, if any."""

    def __enter__(self) -> "Watchdog":
        for work in (self._watch, self._listen):
            threading.Thread(target=work, name=f"watchdog{work.__name__}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._is_ending.is_set():
            # The end of another rank has broken the collective in this rank. The resulting error
            # must not replace the hang in the logbook or in the exit status: wait until the
            # watchdog ends the process.
            threading.Event().wait()

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            # A moment without memory must not end the only thread that can end a hung rank.
            with suppress(MemoryError):
                self._watch_until_over()
                is_over = True

    def _watch_until_over(self) -> None:
        work = self._activity.work
        num_beats = self._activity.num_beats
        looked_at = time.monotonic()
        while not self._is_over.wait(POLL_SECONDS):
            now = time.monotonic()
            late = now - looked_at - POLL_SECONDS
            if late > STOPPED_SECONDS:
                self._activity.stopped_seconds += late
            if self._activity.work is work and not (
                work.has_beats and self._activity.num_beats > num_beats
            ):
                # Bounded, because a process that was suspended for an hour has not hung for an
                # hour.
                self._idle_seconds += min(now - looked_at, 2 * POLL_SECONDS)
            else:
                work = self._activity.work
                num_beats = self._activity.num_beats
                self._idle_seconds = 0.0
            looked_at = now
            if work.limit_seconds is not None and self._idle_seconds > work.limit_seconds:
                what = (
                    "has shown no sign of life for" if work.has_beats else "has taken longer than"
                )
                self._end(
                    f"{work.kind} {what} {work.limit_seconds:.3g} s on rank {self._watched.rank}"
                )
            elif self._alarm is not None:
                self._end(self._alarm)

    def _listen(self) -> None:
        """Poll for another rank's alarm.

        A thread of its own: the store of a lost machine never answers.
        """
        while self._alarm is None and not self._is_over.wait(POLL_SECONDS):
            try:
                self._alarm = (
                    self._store.get("cause").decode() if self._store.check(["cause"]) else None
                )
            except (RuntimeError, MemoryError) as error:
                # This rank still watches its own activity.
                log.debug("the ranks' store does not answer: %s", error)

    def _end(self, cause: str) -> NoReturn:
        """Find and report what hangs, together with the other ranks; end the process in any
        case.
        """
        self._is_ending.set()
        end_after(partial(self._explain, cause), HUNG, END_SECONDS)

    def _explain(self, cause: str) -> None:
        """Dump this rank's state, and find the verdict together with the other ranks."""
        state = self._state()
        path = self._watched.folder / f"hang-{self._watched.rank}.txt"
        try:
            write_dump(path, cause, state)
            log.error("%s; stacks and collectives are in %s", cause, path)
        except Exception as error:  # noqa: BLE001 - no error of the dump may keep a hung rank alive
            log.error("%s; stacks and collectives were not written: %s", cause, error)
        self._compare(cause, state, path)

    def _compare(self, cause: str, state: RankState, path: Path) -> None:
        try:
            self._find_verdict(cause, state, path)
        except RuntimeError as error:
            log.warning(
                "the ranks' store is gone, so this rank ends without waiting for the others: %s",
                error,
            )

    def _find_verdict(self, cause: str, state: RankState, path: Path) -> None:
        self._store.set("cause", cause)
        self._store.set(f"state/{state.rank}", json.dumps(asdict(state)))
        states = self._gather_states()
        text = f"{cause}; {verdict(states, self._watched.num_ranks)}"
        with suppress(OSError), path.open("a") as file:
            file.write(f"\nVerdict: {text}\n")
        self._store.set(f"written/{state.rank}", "")
        # All ranks are ended as soon as one ends, so each waits until all have written and one has
        # reported.
        if state.rank == min(states):
            log.error("hung: %s", text)
            try:
                self._watched.report(text)
            except (OSError, RuntimeError) as error:
                log.error("the verdict was not reported: %s", error)
            deadline = time.monotonic() + WRITE_SECONDS
            for rank in states:
                self._wait_for(f"written/{rank}", deadline - time.monotonic())
            self._store.set("reported", "")
        else:
            self._wait_for("reported", ANSWER_SECONDS)

    def _gather_states(self) -> dict[int, RankState]:
        """Return the states of the ranks that answer in time."""
        deadline = time.monotonic() + ANSWER_SECONDS
        states = {}
        for rank in range(self._watched.num_ranks):
            if self._wait_for(f"state/{rank}", deadline - time.monotonic()):
                states[rank] = from_values(json.loads(self._store.get(f"state/{rank}")))
        return states

    def _wait_for(self, key: str, seconds: float) -> bool:
        """Wait until the key is set, for at most `seconds`; return whether it is set."""
        return retry_blocking(lambda: self._store.check([key]), seconds=seconds, pause_seconds=0.05)

    def _state(self) -> RankState:
        location = find_location(self._training_thread)
        groups = tuple(group_states(flight_record(), island_groups()))
        return RankState(
            self._watched.rank, self._activity.work.kind, self._idle_seconds, *location, groups
        )


def write_dump(path: Path, cause: str, state: RankState) -> None:
    """Append the stacks of all threads of this process and its recorded collectives to the file."""
    with path.open("a") as file:
        file.write(
            f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} process {os.getpid()}: {cause}\n"
            f"{state}\n\n"
        )
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write(
            "\nCollectives recorded by torch's flight recorder, one per line, oldest first\n"
        )
        for entry in flight_record():
            file.write(json.dumps(entry, sort_keys=True) + "\n")


def flight_record() -> list[dict[str, Any]]:
    """Return this process's last collectives by torch's flight recorder, in the order they
    began.
    """
    # If torch is built with NCCL, NCCL has a recorder of its own.
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    traces = [
        json.loads(dump(includeCollectives=True, onlyActive=False))
        for dump in dumps
        if dump is not None
    ]
    entries = [entry for trace in traces for entry in trace.get("entries", [])]
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def island_groups() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the purpose and ranks of each process group of this rank, by the group's name."""
    world = dist.distributed_c10d._world
    ranks = world.pg_group_ranks
    return {
        name: (group.group_desc, tuple(sorted(ranks[group])))
        for group, name in world.pg_names.items()
    }


def find_location(thread: int) -> tuple[str, bool]:
    """Return the `file:line in function` that a thread executes, and whether it may wait for
    ranks.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end", False
    name = frame.f_code.co_filename
    may_wait = f"{os.sep}torch{os.sep}" in name or reads_tensor(expression_of(frame))
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}", may_wait


def expression_of(frame: FrameType) -> str:
    """Return the part of its line that a frame executes, such as `sums.tolist()`.

    Empty without source.
    """
    line, _, first, last = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    # Positions in code objects count bytes.
    text = linecache.getline(frame.f_code.co_filename, line or 0).encode()
    return text[first:last].decode(errors="replace")
