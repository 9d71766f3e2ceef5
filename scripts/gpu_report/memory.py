"""Compares the peak memory of a step with the plan of `diloco mesh`."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from inner.config import ParallelConfig
from inner.dry_run.live_bytes import LiveBytes
from inner.measure.memory import estimate_memory
from inner.model.sizes import PRESETS
from inner.trainer import Trainer
from scripts.gpu_report.place import Place, Row, guarded
from scripts.gpu_report.training import TINY, TrainingCase, one_rank, wait_for_device

TOLERANCE = 0.1


def compare_peaks(place: Place) -> Iterator[Row]:
    with one_rank(place):
        for recompute in ("none", "selective", "full"):
            for num_micro_batches in (1, 2):
                parallel = ParallelConfig.model_validate({"recompute": recompute})
                case = replace(
                    build_case(place), parallel=parallel, num_micro_batches=num_micro_batches
                )
                name = f"recompute {recompute}, {num_micro_batches} micro-batches"
                yield from guarded(name, lambda case=case: compare(place, case))


def build_case(place: Place) -> TrainingCase:
    """Return a case with layers as wide as those of 8b: the plan's parts keep their proportions.

    It has 2.8 GB of weights.
    """
    if place.is_tiny:
        return TrainingCase(
            replace(TINY, dim=128, num_layers=4, ffn_dim=320, vocab_size=512), 64, 4
        )
    return TrainingCase(replace(PRESETS["8b"], num_layers=2, vocab_size=32000), 4096, 1)


def compare(place: Place, case: TrainingCase) -> Row:
    """Measure the second step, because the first one creates the optimizer's state."""
    trainer = case.build(place.first, weights_matter=False)
    trainer.step(case.windows(0))
    found = measure_peak(place, trainer, case.windows(1))
    planned = estimate_memory(case.work, "adamw", place.device)[0].peak
    more = found / planned - 1
    return {
        "peak_GB": found / 1e9,
        "planned_GB": planned / 1e9,
        "more": more,
        "ok": abs(more) <= TOLERANCE,
    }


def measure_peak(place: Place, trainer: Trainer, windows: list[Tensor]) -> int:
    """Return the most bytes of tensors at one time in a step."""
    if place.is_tiny:
        with LiveBytes(_state_of(trainer), "cpu") as live:
            trainer.step(windows)
        return live.peak
    torch.cuda.reset_peak_memory_stats()
    trainer.step(windows)
    wait_for_device(place)
    return torch.cuda.max_memory_allocated()


def _state_of(trainer: Trainer) -> list[Tensor]:
    modules = [
        tensor
        for stage in trainer.model_parts
        for tensor in (*stage.parameters(), *stage.buffers())
    ]
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return [
        *modules,
        *(value for state in states for value in state.values() if isinstance(value, Tensor)),
    ]
