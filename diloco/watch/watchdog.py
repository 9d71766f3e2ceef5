"""Ends an island of which a rank no longer moves, after every rank has said where it stands.

Each rank has a Watchdog: a thread that looks at the rank's Heartbeat. When a piece of work takes longer than it may, it
raises an alarm in the ranks' own store (torchrun's). All ranks then write ISLAND_DIR/hang-<rank>.txt: the Python stacks
of all threads and torch's flight recorder. They compare what they were doing, one of them tells the verdict, and each
process ends with status HUNG, so that torchrun starts the island again.
"""

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from diloco.heartbeat import Heartbeat
from diloco.signals import end_after
from diloco.verdict import RankState, from_values, group_states, to_values, verdict

log = logging.getLogger(__name__)

HUNG = 85
"""Exit status of a rank that its watchdog has ended."""
POLL_SECONDS = 1.0
ANSWER_SECONDS = 20.0
"""How long ranks wait for one another's state, and then for one of them to have told the verdict."""
WRITE_SECONDS = 5.0
"""How long the rank that tells the verdict waits for others to have written it."""
END_SECONDS = 2 * ANSWER_SECONDS + 5.0
"""A rank ends so long after its alarm whoever answers."""


@dataclass(frozen=True)
class Post:
    """A rank of an island, and where its hang is told."""

    rank: int
    num_ranks: int
    folder: Path
    tell: Callable[[str], None]
    """Called with the verdict on one rank: the first of those that can answer."""


class Watchdog:
    """`with Watchdog(...):` around an island's life, on every rank; the process group must be there."""

    def __init__(self, heartbeat: Heartbeat, post: Post) -> None:
        self._heartbeat, self._post = heartbeat, post
        # A connection of its own: another thread may wait on the one that torch uses.
        self._store = dist.PrefixStore("hang", dist.distributed_c10d._get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._training_thread = threading.get_ident()
        self._is_over = threading.Event()
        self._idle_seconds = 0.0
        self._alarm: str | None = None
        """Why another rank has raised the alarm, if one has."""

    def __enter__(self) -> "Watchdog":
        for work in (self._watch, self._listen):
            threading.Thread(target=work, name=f"watchdog{work.__name__}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        work, looked_at = self._heartbeat.work, time.monotonic()
        while not self._is_over.wait(POLL_SECONDS):
            now = time.monotonic()
            if self._heartbeat.work is work:
                # No more than the wait: a process that was stopped for an hour has not been idle for one.
                self._idle_seconds += min(now - looked_at, 2 * POLL_SECONDS)
            else:
                work, self._idle_seconds = self._heartbeat.work, 0.0
            looked_at = now
            if work.limit_seconds is not None and self._idle_seconds > work.limit_seconds:
                self._end(f"{work.kind} has taken longer than {work.limit_seconds:.3g} s on rank {self._post.rank}")
            elif self._alarm is not None:
                self._end(self._alarm)

    def _listen(self) -> None:
        """Hear another rank's alarm. In a thread of its own: the store of a machine that is gone never answers."""
        while self._alarm is None and not self._is_over.wait(POLL_SECONDS):
            try:
                self._alarm = self._store.get("cause").decode() if self._store.check(["cause"]) else None
            except RuntimeError as error:
                # torchrun ends its workers when its store goes; this rank still has its own heartbeat.
                log.debug("the ranks' store does not answer: %s", error)

    def _end(self, cause: str) -> NoReturn:
        """Write where this rank stands, then find out with the others who is to blame, and end in any case."""
        state = self._state()
        path = self._post.folder / f"hang-{self._post.rank}.txt"
        try:
            write_dump(path, cause, state)
            log.error("%s; stacks and collectives are in %s", cause, path)
        except OSError as error:
            # A full disk must not keep a rank that hangs alive.
            log.error("%s; stacks and collectives were not written: %s", cause, error)
        end_after(partial(self._compare, cause, state, path), HUNG, END_SECONDS)

    def _compare(self, cause: str, state: RankState, path: Path) -> None:
        self._store.set("cause", cause)
        self._store.set(f"state/{state.rank}", json.dumps(to_values(state)))
        states = self._states()
        text = f"{cause}; {verdict(states, self._post.num_ranks)}"
        with suppress(OSError), path.open("a") as file:
            file.write(f"\nVerdict: {text}\n")
        self._store.set(f"written/{state.rank}", "")
        # torchrun ends all ranks as soon as one has ended: nobody does before all have written and one has told.
        if state.rank == min(states):
            self._tell(text)
            deadline = time.monotonic() + WRITE_SECONDS
            for rank in states:
                self._wait_for(f"written/{rank}", deadline - time.monotonic())
            self._store.set("told", "")
        else:
            self._wait_for("told", ANSWER_SECONDS)

    def _tell(self, text: str) -> None:
        log.error("hung: %s", text)
        try:
            self._post.tell(text)
        except (OSError, RuntimeError) as error:
            log.error("the verdict was not told: %s", error)

    def _states(self) -> dict[int, RankState]:
        """Of each rank that answers in time."""
        deadline, states = time.monotonic() + ANSWER_SECONDS, {}
        for rank in range(self._post.num_ranks):
            if self._wait_for(f"state/{rank}", deadline - time.monotonic()):
                states[rank] = from_values(json.loads(self._store.get(f"state/{rank}")))
        return states

    def _wait_for(self, key: str, seconds: float) -> bool:
        """Whether somebody sets the key in time."""
        deadline = time.monotonic() + seconds
        while not (is_there := self._store.check([key])) and time.monotonic() < deadline:
            time.sleep(0.05)
        return is_there

    def _state(self) -> RankState:
        place, is_in_torch = place_of(self._training_thread)
        groups = tuple(group_states(recorded(), island_groups()))
        return RankState(self._post.rank, self._heartbeat.work.kind, self._idle_seconds, place, is_in_torch, groups)


def write_dump(path: Path, cause: str, state: RankState) -> None:
    """Add to the file what all threads of this process are at, and its collectives."""
    with path.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} process {os.getpid()}: {cause}\n{state}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write("\nCollectives, by torch's flight recorder, one a line, the last one last\n")
        for entry in recorded():
            file.write(json.dumps(entry, sort_keys=True) + "\n")


def recorded() -> list[dict[str, Any]]:
    """torch's flight recorder: the last collectives of this process, in the order in which they began."""
    # NCCL keeps a recorder of its own, where torch has been built with it.
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    traces = [json.loads(dump(includeCollectives=True, onlyActive=False)) for dump in dumps if dump is not None]
    entries = [entry for trace in traces for entry in trace.get("entries", [])]
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def island_groups() -> dict[str, tuple[str, list[int]]]:
    """By name: purpose and ranks of each process group that this rank is in."""
    world = dist.distributed_c10d._world
    return {name: (group.group_desc, sorted(world.pg_group_ranks[group])) for group, name in world.pg_names.items()}


def place_of(thread: int) -> tuple[str, bool]:
    """`file:line in function` that a thread is at, and whether that is inside of torch."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end", False
    name = frame.f_code.co_filename
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}", f"{os.sep}torch{os.sep}" in name
