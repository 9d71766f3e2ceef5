"""Profiles of selected inner steps: each rank's trace for Perfetto or TensorBoard, and its memory
use.

If a profile cannot be made or written, a warning is logged, and training goes on.
"""

import csv
import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from inner.config import ProfileConfig

log = logging.getLogger(__name__)

MEMORY = "[memory]"
OPERATIONS = ("cpu_op", "user_annotation")
"""Categories of the events in torch's traces that are used here."""


class Profiler:
    """Use `with Profiler(...) as profiler:` around the training loop and call `profiler.step()`
    after each inner step.

    It writes to `folder` after the last selected step, or when the loop ends, also by an error:

        rank<r>.<first>.pt.trace.json.gz    operations, collectives and steps (ProfilerStep#<n>)
        rank<r>.<first>.memory.csv          with memory, on a CPU: each allocation, bytes since the
                                            start, operation
        rank<r>.<first>.memory.pickle       with memory, on CUDA: a snapshot for
                                            pytorch.org/memory_viz

    It does not communicate, and costs nothing until one step before the first selected step.
    """

    def __init__(self, config: ProfileConfig, folder: Path, rank: int, steps_done: int = 0) -> None:
        self._first, self._last = config.steps or (0, 0)
        self._with_memory = config.memory
        self._base = folder / f"rank{rank}.{self._first}"
        self._done = steps_done
        self._profile: profile | None = None
        self._is_recording = False
        self._label: record_function | None = None

    def __enter__(self) -> "Profiler":
        self._begin(self._done + 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._is_recording:
            self._write()

    def step(self) -> None:
        self._end()
        self._done += 1
        if self._is_recording and self._done >= self._last:
            self._write()
        self._begin(self._done + 1)

    def _begin(self, step: int) -> None:
        if not self._first - 1 <= step <= self._last or self._last == 0:
            return
        try:
            self._begin_step(step)
        except Exception as error:  # noqa: BLE001 - training does not need the profile
            self._last = 0
            self._warn(error)

    def _begin_step(self, step: int) -> None:
        if self._profile is None:
            # Prepare one step ahead: the first use of the tracer is slow and would show in the
            # trace.
            self._profile = profile(record_shapes=True, profile_memory=self._with_memory)
            self._profile.prepare_trace()
        if step >= self._first and not self._is_recording:
            if self._with_memory and torch.cuda.is_available():
                torch.cuda.memory._record_memory_history()
            self._profile.start_trace()
            self._is_recording = True
        if step >= self._first:
            # Trace viewers recognise a step by this name.
            self._label = record_function(f"ProfilerStep#{step}")
            self._label.__enter__()

    def _end(self) -> None:
        if self._label is not None:
            self._label.__exit__(None, None, None)
            self._label = None

    def _write(self) -> None:
        assert self._profile is not None
        made = self._profile
        self._profile = None
        self._is_recording = False
        try:
            self._write_files(made)
        except Exception as error:  # noqa: BLE001 - as in _begin
            self._warn(error)

    def _write_files(self, made: profile) -> None:
        made.stop_trace()
        self._base.parent.mkdir(parents=True, exist_ok=True)
        trace = Path(f"{self._base}.pt.trace.json.gz")
        made.export_chrome_trace(str(trace))
        if self._with_memory and torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{self._base}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        elif self._with_memory:
            _write_memory(trace, Path(f"{self._base}.memory.csv"))

    def _warn(self, error: Exception) -> None:
        log.warning(
            "%s: no profile could be made (%s: %s); training goes on",
            self._base,
            type(error).__name__,
            error,
        )


def _write_memory(trace: Path, table: Path) -> None:
    """Write a table of allocations from the trace's events, because torch's export_memory_timeline
    fails on FSDP steps.
    """
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("microseconds", "bytes", "bytes_since_start", "operation"))
        writer.writerows(_allocations(events))


def _allocations(events: list[dict[str, Any]]) -> Iterator[tuple[float, int, int, str]]:
    """Yield (microseconds, bytes, bytes since the start, innermost operation) for each allocation;
    a release is negative.
    """
    relevant = [
        event for event in events if event.get("name") == MEMORY or event.get("cat") in OPERATIONS
    ]
    open_operations: dict[int, list[tuple[float, str]]] = {}
    started_at = min(event["ts"] for event in relevant)
    for event in sorted(relevant, key=lambda event: (event["ts"], event["name"] == MEMORY)):
        stack = open_operations.setdefault(event["tid"], [])
        while stack and stack[-1][0] < event["ts"]:
            stack.pop()
        if event["name"] == MEMORY:
            # aten::empty does not show what the allocation is for.
            names = [name for _, name in stack if not name.startswith("aten::empty")]
            size = event["args"]["Bytes"]
            total = event["args"]["Total Allocated"]
            yield event["ts"] - started_at, size, total, names[-1] if names else ""
        else:
            stack.append((event["ts"] + event.get("dur", 0), event["name"]))
