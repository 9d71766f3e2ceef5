"""One step in detail: where host and device wait for each other, the longest kernels, and how long the device idles."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from diloco.errors import ConfigError
from diloco.planning.mesh.dry_run import rehearse_apart
from inner.config import ParallelConfig
from inner.dry_run.case import Rehearsal
from inner.mesh import Degrees
from inner.model.sizes import PRESETS
from inner.trainer import Trainer
from scripts.gpu_report.place import Place, Row, guarded
from scripts.gpu_report.training import TINY, TrainingCase, one_rank, wait_for_device

MOST_KERNELS = 12
WARM_STEPS = 3


def watch_a_step(place: Place) -> Iterator[Row]:
    case = build_case(place)
    with one_rank(place):
        trainer = case.build(place.first)
        for step in range(WARM_STEPS):
            trainer.step(case.windows(step))
        yield from guarded("crossings", lambda: count_crossings(place, case, trainer))
        try:
            yield from profile_step(place, case, trainer)
        except RuntimeError as error:
            yield {"name": "profile", "problem": str(error), "ok": False}


def build_case(place: Place) -> TrainingCase:
    if place.is_tiny:
        return TrainingCase(TINY, 32, 2, num_micro_batches=2)
    sizes = replace(PRESETS["1b"], num_layers=8)
    return TrainingCase(sizes, 4096, 1, num_micro_batches=2, parallel=ParallelConfig(recompute="selective"))


def count_crossings(place: Place, case: TrainingCase, trainer: Trainer) -> Row:
    """Waits of the host in a step, as CUDA reports them, against those that the dry run counts: the budget."""
    # What was counted is reported also where this torch is too old for a dry run.
    waits: Row = {"found": None} if place.is_tiny else count_waits(case, trainer)
    try:
        budget = find_budget(case)
    except ConfigError as error:
        return waits | {"budget": "unknown", "why": str(error)}
    number = sum(budget.values())
    waits |= {"budget": number, "counted_in": budget}
    return waits if place.is_tiny else waits | {"ok": waits["found"] <= number}


def count_waits(case: TrainingCase, trainer: Trainer) -> Row:
    """How often the host waits for the device in a step, and where."""
    windows = case.windows(0)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.step(windows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return {"found": len(waits), "where": sorted(f"{warning.filename}:{warning.lineno}" for warning in waits)}


def find_budget(case: TrainingCase) -> dict[str, int]:
    """Crossings of a step that the dry run counts, by what and where."""
    rehearsal = Rehearsal(
        sizes=case.sizes,
        degrees=Degrees(),
        parallel=case.parallel,
        optimizer=case.optimizer,
        seq_len=case.seq_len,
        micro_batch=case.micro_batch,
        compute_dtype=case.dtype,
    )
    return rehearse_apart(rehearsal).crossings


def profile_step(place: Place, case: TrainingCase, trainer: Trainer) -> Iterator[Row]:
    """The kernels (on a CPU the operations) that take longest, and the share of the step without any."""
    activities = [ProfilerActivity.CPU] if place.is_tiny else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    windows = case.windows(1)
    with profile(activities=activities) as profiled:
        trainer.step(windows)
        wait_for_device(place)
    events = profiled.events()
    assert events is not None
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    if not place.is_tiny:
        spans = [(event.time_range.start, event.time_range.end) for event in kernels]
        whole = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
        yield {"name": "device", "step_ms": whole / 1e3, "idle_share": 1 - busy(spans) / whole, "kernels": len(spans)}
    rows = profiled.key_averages()
    times = {row.key: row.self_cpu_time_total if place.is_tiny else row.self_device_time_total for row in rows}
    total = sum(times.values()) or 1.0
    for row in sorted(rows, key=lambda row: -times[row.key])[:MOST_KERNELS]:
        yield {"name": row.key[:60], "ms": times[row.key] / 1e3, "share": times[row.key] / total, "calls": row.count}


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
