"""The input and the result of a dry run. No torch here."""

from dataclasses import dataclass

from inner.config import OptimizerConfig, ParallelConfig
from inner.measure.traffic.rows import TrafficRow
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The model and mesh to build, and the rank that makes a step."""

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
    """The cost of one rank's second inner step. In the first step the optimizer creates its
    state.
    """

    rank: int
    coordinates: dict[str, int]
    """The rank's coordinate on each axis of the mesh."""
    num_params: int
    """Number of parameters that this rank holds."""
    peak_bytes: int
    """Peak of the device's memory, in bytes."""
    traffic: list[TrafficRow]
    """The bytes that this rank sends, by axis and operation."""
    crossings: dict[str, int]
    """Number of reads by the host and of copies between device and host, by kind and place in the
    code."""
    misplaced: dict[str, int]
    """Number of collectives on tensors that are not on the device, by kind and place; they would be
    slow or fail."""
    seconds: float
    """Duration of the dry run itself."""
