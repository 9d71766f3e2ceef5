"""Shows one step in detail: waits of the host, the longest kernels, the device's idle time."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from diloco.errors import ConfigError
from diloco.planning.mesh.dry_run import rehearse_apart
from inner.config import ParallelConfig
from inner.dry_run.case import Rehearsal
from inner.mesh import Degrees
from inner.model.sizes import PRESETS
from inner.trainer import Trainer
from scripts.gpu_report.place import Place, Row, guarded, guarded_rows
from scripts.gpu_report.training import TINY, TrainingCase, one_rank, wait_for_device

MOST_KERNELS = 12
MOST_CHARACTERS = 90
WARM_STEPS = 3
STEPS = 2
"""Number of steps that are profiled, so that the time between two steps is seen, too."""


def watch_a_step(place: Place) -> Iterator[Row]:
    case = build_case(place)
    with one_rank(place):
        trainer = build_warm(place, case)
        yield from guarded_rows("profile", lambda: profile_steps(place, case, trainer))
        if place.with_compile:
            yield from guarded("device, compiled", lambda: find_idle_share(place, compiled(case)))
        yield from guarded("crossings", lambda: count_crossings(place, case, trainer))


def build_warm(place: Place, case: TrainingCase) -> Trainer:
    """Build a trainer, and make its first steps, which take longest."""
    trainer = case.build(place.first, weights_matter=False)
    for step in range(WARM_STEPS):
        trainer.step(case.windows(step))
    return trainer


def compiled(case: TrainingCase) -> TrainingCase:
    return replace(case, parallel=case.parallel.model_copy(update={"compile": True}))


def build_case(place: Place) -> TrainingCase:
    if place.is_tiny:
        return TrainingCase(TINY, 32, 2, num_micro_batches=2)
    sizes = replace(PRESETS["1b"], num_layers=8)
    return TrainingCase(
        sizes, 4096, 1, num_micro_batches=2, parallel=ParallelConfig(recompute="selective")
    )


def count_crossings(place: Place, case: TrainingCase, trainer: Trainer) -> Row:
    """Compare the host's waits in a step, as CUDA reports them, with the dry run's count."""
    # The counted waits are reported even if the dry run fails.
    waits: Row = {"found": None} if place.is_tiny else count_waits(case, trainer)
    try:
        budget = find_budget(case)
    except ConfigError as error:
        return waits | {"budget": "unknown", "why": str(error)}
    number = sum(budget.values())
    waits |= {"budget": number, "counted_in": budget}
    return waits if place.is_tiny else waits | {"ok": waits["found"] <= number}


def count_waits(case: TrainingCase, trainer: Trainer) -> Row:
    """Count how often the host waits for the device in a step, and where."""
    windows = case.windows(0)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.step(windows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return {
        "found": len(waits),
        "where": sorted(f"{warning.filename}:{warning.lineno}" for warning in waits),
    }


def find_budget(case: TrainingCase) -> dict[str, int]:
    """Return the crossings of a step that the dry run counts, by kind and place."""
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


def find_idle_share(place: Place, case: TrainingCase) -> Row:
    return describe_device(profile(place, case, build_warm(place, case)))


def profile_steps(place: Place, case: TrainingCase, trainer: Trainer) -> Iterator[Row]:
    """Yield how long the device idles, and the longest kernels (on a CPU, operations)."""
    kernels = profile(place, case, trainer)
    yield {"name": "device, eager", **describe_device(kernels)}
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name[:MOST_CHARACTERS], []).append(kernel.own_ms)
    total = sum(kernel.own_ms for kernel in kernels) or 1.0
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST_KERNELS]:
        share = sum(times) / total
        yield {"name": name, "ms": sum(times) / STEPS, "share": share, "calls": len(times) / STEPS}


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran on the device; on a CPU an operation of torch."""

    name: str
    start_ms: float
    end_ms: float
    own_ms: float
    """Milliseconds without the operations inside it."""


def profile(place: Place, case: TrainingCase, trainer: Trainer) -> list[Kernel]:
    """Return the kernels of a few steps.

    On a GPU the host is not profiled, because that would slow down its launches.
    """
    windows = case.windows(1)
    wait_for_device(place)
    activity = ProfilerActivity.CPU if place.is_tiny else ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiled:
        for _ in range(STEPS):
            trainer.step(windows)
        wait_for_device(place)
    return find_kernels(profiled.events() or [], place.is_tiny)


def find_kernels(events: Iterable[FunctionEvent], is_tiny: bool) -> list[Kernel]:
    """Return the kernels, copies and fills among the profiler's events.

    Annotations are left out: they span the time between kernels, too.
    """
    kind = torch.autograd.DeviceType.CPU if is_tiny else torch.autograd.DeviceType.CUDA
    chosen = [e for e in events if e.device_type == kind and not e.is_user_annotation]
    return [
        Kernel(
            event.name,
            event.time_range.start / 1e3,
            event.time_range.end / 1e3,
            (event.self_cpu_time_total if is_tiny else event.time_range.elapsed_us()) / 1e3,
        )
        for event in chosen
    ]


def describe_device(kernels: Sequence[Kernel]) -> Row:
    """Return the share of time in which nothing runs, from the first to the last kernel."""
    if not kernels:
        raise RuntimeError("the profiler has seen no kernel")
    whole = max(kernel.end_ms for kernel in kernels) - min(kernel.start_ms for kernel in kernels)
    used = busy((kernel.start_ms, kernel.end_ms) for kernel in kernels)
    return {
        "step_ms": whole / STEPS,
        "idle_share": 1 - used / whole,
        "kernels": len(kernels) / STEPS,
    }


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of some spans."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
