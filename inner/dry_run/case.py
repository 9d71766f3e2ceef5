"""The input and the result of a dry run. No torch here."""

from dataclasses import dataclass

from inner.config import OptimizerConfig, ParallelConfig
from inner.measure.traffic.rows import TrafficRow
from inner.measure.workload import Workload
from inner.mesh import Degrees, accumulation_steps
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
    all_rows_arrive: bool = False
    """As in Workload."""

    @property
    def work(self) -> Workload:
        """What the planner knows of the step."""
        data_ranks = self.degrees.num_data_ranks
        tokens = self.optimizer.tokens_per_step
        return Workload(
            sizes=self.sizes,
            degrees=self.degrees,
            parallel=self.parallel,
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            num_micro_batches=accumulation_steps(
                tokens, self.seq_len, self.micro_batch, data_ranks
            ),
            compute_itemsize=4 if self.compute_dtype == "float32" else 2,
            deals_matrices=self.optimizer.name == "muon",
            balance=self.optimizer.balance,
            all_rows_arrive=self.all_rows_arrive,
        )


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
