"""The candidate settings of an island: which fit into its memory, how fast each is, which is
best.
"""

import os
from dataclasses import dataclass
from typing import get_args

from diloco.config.schema import IslandConfig, RunConfig
from diloco.doctor.host_memory_check import plan_node_memory
from diloco.planning.mesh.step_plan import build_step_plan
from diloco.tuning.layer_speed import measure_layer_speeds
from inner.config import Recompute
from inner.flops import flops_per_token
from inner.mesh import resolve_degrees

GPU_SHARE = 0.9
"""Share of a GPU's free memory that a planned step may take.

Plans are accurate to 5 %, and libraries need some memory, too.
"""
AS_FAST = 0.97
"""Candidates with at least this share of the best speed count as equally fast.

Measured speeds vary by some percent.
"""


@dataclass(frozen=True)
class Candidates:
    """Settings of one island on one kind of device, in the order of list_candidates."""

    run: RunConfig
    islands: list[IslandConfig]
    device: str
    free_bytes: float
    """Free memory of the GPU that has the least.

    Infinite on the CPU, where the host's memory counts.
    """

    def find_fitting(self) -> list[int]:
        """Return the numbers of the candidates that fit into memory with the lowest degree of tp.

        Higher degrees send more.
        """
        fitting = [number for number, island in enumerate(self.islands) if self._fits(island)]
        return [
            number
            for number in fitting
            if self.islands[number].mesh.tp == self.islands[fitting[0]].mesh.tp
        ]

    def measure(self, numbers: list[int]) -> dict[int, float]:
        """Return the tokens per second of a layer on this device, by candidate.

        It is the measured speed, reduced by the share of recomputation. Micro-batches for which
        there is no time are left out.
        """
        first = self.islands[numbers[0]]
        work = build_step_plan(self.run, first).work
        sizes = sorted({self.islands[n].micro_batch for n in numbers})
        positions = work.seq_len // work.degrees.cp
        dtype = first.resolve_compute_dtype(self.device)
        speeds = measure_layer_speeds(work.sizes, positions, sizes, self.device, dtype)
        by_number = {}
        for number in numbers:
            island = self.islands[number]
            if island.micro_batch in speeds:
                flops = flops_per_token(work.sizes, work.seq_len, island.parallel.recompute)
                by_number[number] = speeds[island.micro_batch] * flops.total / flops.hardware
        return by_number

    def find_best(self, speeds: dict[int, float]) -> int:
        """Return the best candidate among those about as fast as the fastest.

        It has the least recomputation, then the smallest micro-batch: the formula of FLOPs ignores
        the cheap operations that `selective` repeats.
        """
        fast = [
            number for number, speed in speeds.items() if speed >= AS_FAST * max(speeds.values())
        ]
        kinds = get_args(Recompute)
        return min(
            fast,
            key=lambda n: (
                kinds.index(self.islands[n].parallel.recompute),
                self.islands[n].micro_batch,
            ),
        )

    def _fits(self, island: IslandConfig) -> bool:
        if self.device.startswith("cuda"):
            return peak_bytes(self.run, island, self.device) <= GPU_SHARE * self.free_bytes
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return not plan_node_memory(self.run, island, self.device, num_local).is_scarce


def peak_bytes(run: RunConfig, island: IslandConfig, device: str) -> int:
    """Return the planned peak memory of an inner step on the fullest rank, in bytes."""
    here = island.model_copy(update={"device": device.partition(":")[0]})
    return max(each.peak for each in build_step_plan(run, here).memory)


def describe(island: IslandConfig) -> str:
    """Describe the settings as text."""
    mesh = resolve_degrees(island.mesh, island.ranks)
    return f"micro_batch {island.micro_batch}, recompute {island.parallel.recompute}, {mesh}"
