"""Make one inner step of one rank on the dry run's device, with the real trainer at its real
size.

A mixture of experts is routed evenly, because routers have no values to choose by: a rank has
per_token rows for each of its tokens, and the ranks of ep send each other equally many of them
(routes.py). Counts that the host reads from the device are equal for all experts.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inner.data.micro_batch import Cutter, Packing, build_packing
from inner.dry_run.accelerator import DEVICE_TYPE
from inner.dry_run.case import Rehearsal, RehearsalResult
from inner.dry_run.comm_counter import CommCounter, island_groups
from inner.dry_run.routes import set_routes
from inner.dry_run.step_tracker import StepTracker
from inner.dry_run.world import enter_world, without_values
from inner.mesh import IslandMesh
from inner.params import local_tensor
from inner.trainer import Trainer, TrainerSettings

DEVICE = f"{DEVICE_TYPE}:0"


class RehearsingCutter(Cutter):
    """Cuts windows without values. Each window is treated as a single document."""

    def pack(self, tokens_BT: Tensor) -> Packing:
        num_attended = tokens_BT.shape[1] if self.attends_everywhere else len(self.positions_S)
        return build_packing(
            np.zeros(tokens_BT.shape, dtype=np.int64), np.arange(num_attended), self.device
        )


class RehearsingTrainer(Trainer):
    """A Trainer that cuts windows without values. StepTracker lets it read 1 as the number of
    tokens, so that no step is skipped.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cutter = RehearsingCutter(**vars(self._cutter))


def rehearse(case: Rehearsal) -> RehearsalResult:
    """Make two inner steps and report on the second. Call it once per process, and do nothing else
    in the process afterwards.

    Raises InputError if the mesh does not fit the model.
    """
    started = time.perf_counter()
    enter_world(case.degrees.num_ranks, case.rank)
    mesh = IslandMesh(case.degrees, DEVICE_TYPE)
    # The groups are made here, because making them needs values.
    groups = island_groups(mesh, has_experts=case.sizes.experts is not None)
    with without_values():
        trainer = build_rehearsing_trainer(case, mesh)
        set_routes(trainer.model_parts, case.work)
        windows = _make_windows(case, trainer.micro_batches_per_step)
        with StepTracker():
            trainer.step(windows)
        with CommCounter(groups) as counter, StepTracker(_state_of(trainer)) as tracker:
            trainer.step(windows)
    return RehearsalResult(
        rank=case.rank,
        coordinates=dict(mesh.at),
        num_params=sum(
            local_tensor(param).numel()
            for stage in trainer.model_parts
            for param in stage.parameters()
        ),
        peak_bytes=tracker.peak,
        traffic=counter.rows,
        crossings=dict(tracker.crossings),
        misplaced=dict(tracker.misplaced),
        seconds=time.perf_counter() - started,
    )


def build_rehearsing_trainer(case: Rehearsal, mesh: IslandMesh) -> Trainer:
    """Build the trainer of this process's rank, after enter_world. Call it inside
    `without_values`.
    """
    settings = TrainerSettings(
        device=DEVICE,
        compute_dtype=case.compute_dtype,
        micro_batch=case.micro_batch,
        seq_len=case.seq_len,
        seed=0,
        total_steps=100,
        eos_id=case.eos_id,
    )
    return RehearsingTrainer(case.sizes, case.optimizer, mesh, case.parallel, settings)


def _make_windows(case: Rehearsal, count: int) -> list[Tensor]:
    return [
        torch.empty(case.micro_batch, case.seq_len + 1, dtype=torch.int64) for _ in range(count)
    ]


def _state_of(trainer: Trainer) -> Sequence[Tensor]:
    """Return all tensors that remain after a step."""
    params = [param for stage in trainer.model_parts for param in stage.parameters()]
    buffers = [buffer for stage in trainer.model_parts for buffer in stage.buffers()]
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [*params, *buffers, *moments]
