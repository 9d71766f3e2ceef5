"""Memory that a rank needs on its machine's host: what it holds for certain, and what may come on top."""

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
"""Of python and torch on a CPU, without pages of files. Measured: 245 MB after a rank's imports."""
OTHER_PROCESS_BYTES = {"cpu": 200_000_000, "cuda": 2_800_000_000}
"""What they may need besides, by the kind of device. With CUDA's libraries it is a guess."""
STATE = ("global params", "averaged moments", "outer momentum", "last mean")
"""What the outer loop holds from the first round on, and a checkpoint copies."""
ROUND = ("a round's snapshot", "a round's means")
"""What a round needs and the next one uses again. Outside of gossip a test counts it, as it does STATE."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host of an average rank of an island, by purpose. Data is not in it: its files are mapped."""

    certain: dict[str, float]
    """Held at the same time once the first round is committed: a lower bound."""
    possible: dict[str, float]
    """What may come on top: never at all, or not all at once, or by a guess. Allocators may take more than that."""

    @property
    def least(self) -> float:
        """Bytes that the rank cannot do without."""
        return sum(self.certain.values())

    @property
    def estimate(self) -> float:
        """Bytes of all that is counted, as if it came at once."""
        return self.least + sum(self.possible.values())


def estimate_host_memory(
    run: RunConfig,
    island: IslandConfig,
    device_type: str,
    specs: Sequence[ParamSpec],
    num_islands: int,
    inner_step: Sequence[MemoryEstimate] = (),
) -> HostMemory:
    """What a rank needs in a run of so many islands, of a model with these parameters, computing on cpu or cuda.

    `inner_step`: memory of an inner step by pp coordinate; empty if it is not known, as for own models.
    """
    degrees, kept = resolve_degrees(island.mesh, island.ranks), find_state_bytes(run.optimizer)
    num_held = num_elements(specs) * degrees.dp_replicate / degrees.num_ranks
    trained = (FP32_BYTES + min(kept.block_matrix, kept.other)) * num_held
    outer = memory_bytes(run.outer, tuple(specs), num_islands, degrees.num_ranks)
    certain = {"python and torch": float(PROCESS_BYTES)}
    certain |= {purpose: outer.pop(purpose) for purpose in _certain_purposes(run) if purpose in outer}
    on_cpu = device_type == "cpu"
    if on_cpu:
        certain["params and optimizer"] = trained
    if island.checkpoint.every_rounds is not None:
        # Every island saves after its first commit. Gradients may be gone by then.
        certain["a checkpoint that is written"] = trained + sum(certain.get(purpose, 0.0) for purpose in STATE)
    elif on_cpu:
        certain["gradients"] = FP32_BYTES * num_held
    possible = {"other libraries": float(OTHER_PROCESS_BYTES[device_type])} | outer
    if on_cpu and inner_step:
        counted = trained + certain.get("gradients", 0.0)
        possible["the rest of an inner step"] = max(0.0, max(each.peak for each in inner_step) - counted)
    moved = run.outer, tuple(specs), num_islands, degrees.num_ranks
    moving = moving_bytes(*moved, is_copied=not on_cpu)
    possible["slices and parts on their way"] = moving
    if not on_cpu:
        # What comes from a GPU does so in page-locked memory, which torch takes in powers of two and keeps.
        saved = trained if island.checkpoint.every_rounds is not None else 0.0
        possible["page-locked memory rounded up"] = saved + moving - moving_bytes(*moved, is_copied=False)
    return HostMemory(certain, possible)


def _certain_purposes(run: RunConfig) -> tuple[str, ...]:
    return STATE if run.outer.gossip is not None else STATE + ROUND
