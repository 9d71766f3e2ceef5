"""Memory that a rank needs on its machine's host: what it certainly holds, and what may come on
top.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.config.schema import IslandConfig, RunConfig
from inner.measure.memory import MemoryEstimate
from inner.measure.param_specs import num_elements
from inner.mesh import resolve_degrees
from inner.optim.state_bytes import find_state_bytes
from inner.param_spec import ParamSpec
from outer.cost import FP32_BYTES, memory_bytes, moving_bytes

PROCESS_BYTES = 200_000_000
"""Memory of Python and torch on a CPU, without pages of files. Measured: 245 MB after a rank's
imports."""
OTHER_PROCESS_BYTES = {"cpu": 200_000_000, "cuda": 2_800_000_000}
"""Memory that other libraries may need in addition, by the kind of device. For CUDA's libraries it
is a guess."""
STATE = ("global params", "averaged moments", "outer momentum", "last mean")
"""What the outer loop holds from the first round on. A checkpoint copies all of it."""
ROUND = ("a round's snapshot", "a round's means")
"""Buffers that a round needs and the next round reuses. A test counts them, like STATE, except with
gossip."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host of an average rank of an island, by purpose. The data's files are mapped
    and not counted.
    """

    certain: dict[str, float]
    """Held at the same time once the first round is committed: a lower bound."""
    possible: dict[str, float]
    """Bytes that may come on top: never, or not all at the same time, or by a guess. Allocators may
    take more."""

    @property
    def least(self) -> float:
        """Bytes that the rank cannot do without."""
        return sum(self.certain.values())

    @property
    def estimate(self) -> float:
        """Bytes of everything that is counted, as if all of it were held at the same time."""
        return self.least + sum(self.possible.values())


def estimate_host_memory(
    run: RunConfig,
    island: IslandConfig,
    device_type: str,
    specs: Sequence[ParamSpec],
    num_islands: int,
    inner_step: Sequence[MemoryEstimate] = (),
) -> HostMemory:
    """Estimate the host memory of a rank that computes on `device_type`, cpu or cuda.

    The run has `num_islands` islands and a model with the parameters `specs`. `inner_step`: memory
    of an inner step by pp coordinate; empty if it is not known, as for own models.
    """
    degrees = resolve_degrees(island.mesh, island.ranks)
    kept = find_state_bytes(run.optimizer)
    num_held = num_elements(specs) * degrees.dp_replicate / degrees.num_ranks
    trained = (FP32_BYTES + min(kept.block_matrix, kept.other)) * num_held
    outer = memory_bytes(run.outer, tuple(specs), num_islands, degrees.num_ranks)
    certain = {"python and torch": float(PROCESS_BYTES)}
    certain |= {
        purpose: outer.pop(purpose) for purpose in _certain_purposes(run) if purpose in outer
    }
    on_cpu = device_type == "cpu"
    if on_cpu:
        certain["params and optimizer"] = trained
    if island.checkpoint.every_rounds is not None:
        # Every island saves after its first commit. Gradients may be freed by then, so they are not
        # added.
        certain["a checkpoint that is written"] = trained + sum(
            certain.get(purpose, 0.0) for purpose in STATE
        )
    elif on_cpu:
        certain["gradients"] = FP32_BYTES * num_held
    possible = {"other libraries": float(OTHER_PROCESS_BYTES[device_type])} | outer
    if on_cpu and inner_step:
        counted = trained + certain.get("gradients", 0.0)
        possible["the rest of an inner step"] = max(
            0.0, max(each.peak for each in inner_step) - counted
        )
    moved = run.outer, tuple(specs), num_islands, degrees.num_ranks
    moving = moving_bytes(*moved, is_copied=not on_cpu)
    possible["slices and parts on their way"] = moving
    if not on_cpu:
        # Copies from a GPU need page-locked memory. torch allocates it in powers of two and does
        # not give it back.
        saved = trained if island.checkpoint.every_rounds is not None else 0.0
        possible["page-locked memory rounded up"] = (
            saved + moving - moving_bytes(*moved, is_copied=False)
        )
    return HostMemory(certain, possible)


def _certain_purposes(run: RunConfig) -> tuple[str, ...]:
    return STATE if run.outer.gossip is not None else STATE + ROUND
