"""Profiles of chosen inner steps: each rank's trace for Perfetto or TensorBoard, and what its memory was used for."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import profile, record_function

from inner.config import ProfileConfig

MEMORY = "[memory]"
OPERATIONS = ("cpu_op", "user_annotation")
"""Kinds of events in torch's traces."""


class Profiler:
    """`with Profiler(...) as profiler:` around the training loop, `profiler.step()` after each inner step.

    Writes into `folder`, when the last chosen step is done or the loop is left, by an error too:

        rank<r>.<first>.pt.trace.json.gz    operations, collectives and steps (ProfilerStep#<n>)
        rank<r>.<first>.memory.csv          on a CPU, if memory: each allocation, bytes since the start, and for what
        rank<r>.<first>.memory.pickle       on CUDA, if memory: a snapshot for pytorch.org/memory_viz

    No communication; costs nothing before the step that precedes the first chosen one.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        if self._is_recording:
            self._write()

    def step(self) -> None:
        """One more inner step is done."""
        self._end()
        self._done += 1
        if self._is_recording and self._done >= self._last:
            self._write()
        self._begin(self._done + 1)

    def _begin(self, step: int) -> None:
        if not self._first - 1 <= step <= self._last or self._last == 0:
            return
        if self._profile is None:
            # A step ahead: the first use of the tracer is slow, and would be seen in the trace.
            self._profile = profile(record_shapes=True, profile_memory=self._with_memory)
            self._profile.prepare_trace()
        if step >= self._first:
            self._record(self._profile)
            # Viewers know a step by this name.
            self._label = record_function(f"ProfilerStep#{step}")
            self._label.__enter__()

    def _record(self, tracer: profile) -> None:
        if self._is_recording:
            return
        if self._with_memory and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
        tracer.start_trace()
        self._is_recording = True

    def _end(self) -> None:
        if self._label is not None:
            self._label.__exit__(None, None, None)
            self._label = None

    def _write(self) -> None:
        assert self._profile is not None
        self._is_recording = False
        self._profile.stop_trace()
        self._base.parent.mkdir(parents=True, exist_ok=True)
        trace = Path(f"{self._base}.pt.trace.json.gz")
        self._profile.export_chrome_trace(str(trace))
        if self._with_memory and torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{self._base}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        elif self._with_memory:
            _write_memory(trace, Path(f"{self._base}.memory.csv"))
        self._profile = None


def _write_memory(trace: Path, table: Path) -> None:
    """torch's own export_memory_timeline fails on a step with FSDP, so the trace's events are read."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("microseconds", "bytes", "bytes_since_start", "operation"))
        writer.writerows(_allocations(events))


def _allocations(events: list[dict[str, Any]]) -> Iterator[tuple[float, int, int, str]]:
    """Of each allocation or release: when, its size (negative), the sum, and the innermost operation around it."""
    seen = [event for event in events if event.get("name") == MEMORY or event.get("cat") in OPERATIONS]
    running: dict[int, list[tuple[float, str]]] = {}
    started_at = min(event["ts"] for event in seen)
    for event in sorted(seen, key=lambda event: (event["ts"], event["name"] == MEMORY)):
        stack = running.setdefault(event["tid"], [])
        while stack and stack[-1][0] < event["ts"]:
            stack.pop()
        if event["name"] == MEMORY:
            # That something is allocated is no news.
            names = [name for _, name in stack if not name.startswith("aten::empty")]
            size, total = event["args"]["Bytes"], event["args"]["Total Allocated"]
            yield event["ts"] - started_at, size, total, names[-1] if names else ""
        else:
            stack.append((event["ts"] + event.get("dur", 0), event["name"]))
