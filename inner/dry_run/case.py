"""What is rehearsed, and what came of it. No torch here."""

from dataclasses import dataclass

from inner.config import OptimizerConfig, ParallelConfig
from inner.measure.traffic.expected import TrafficRow
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What is built, and which of its ranks makes a step."""

    sizes: ModelSizes
    degrees: Degrees
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    seq_len: int
    micro_batch: int
    compute_dtype: str
    eos_id: int | None = None
    """As in TrainerSettings."""
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class RehearsalResult:
    """What one rank's second inner step has taken; in the first one the optimizer makes its state."""

    rank: int
    coordinates: dict[str, int]
    """The rank's place on each axis of the mesh."""
    num_params: int
    """Parameters that this rank holds."""
    peak_bytes: int
    """The most memory of the device at once."""
    traffic: list[TrafficRow]
    """What this rank sends, by axis and operation."""
    crossings: dict[str, int]
    """Reads by the host and copies between device and host, by what and where."""
    misplaced: dict[str, int]
    """Collectives of tensors that are not on the device; each would be slow or fail."""
    seconds: float
    """Time that all of this has taken here."""
