"""The plan of an island's inner step: workload, optimizer, memory. Starts nothing."""

from dataclasses import dataclass, replace
from functools import cached_property

from diloco.config.check import check_island, list_candidates
from diloco.config.schema import Config, IslandConfig, RunConfig, at_stage, longest_sequence
from diloco.errors import ConfigError
from inner.data.tokenizer import build_tokenizer, known_vocab_size, tokenizer_fingerprint
from inner.measure.memory import MemoryEstimate, estimate_memory
from inner.measure.workload import Workload
from inner.mesh import accumulation_steps, resolve_degrees
from inner.model.sizes import BYTE_VOCAB_SIZE, PRESETS, resolve_sizes
from inner.optim.state_bytes import StateBytes, find_state_bytes
from inner.parallel.pipeline.schedule import Simulation, simulate

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StepPlan:
    """An inner step of one island: its workload, optimizer and device."""

    work: Workload
    optimizer: StateBytes
    device_type: str
    is_vocabulary_assumed: bool

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of the island."""
        work = self.work
        sequences = work.degrees.num_data_ranks * work.num_micro_batches * work.micro_batch
        return sequences * work.seq_len

    @property
    def peak(self) -> int:
        """Bytes that the rank which needs most memory needs."""
        return max(each.peak for each in self.memory)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated schedule of the pipeline."""
        return simulate(self.work.orders)

    @cached_property
    def memory(self) -> list[MemoryEstimate]:
        """Memory of a rank, by pp coordinate."""
        return estimate_memory(self.work, self.optimizer, self.device_type)

    @cached_property
    def worst_memory(self) -> list[MemoryEstimate]:
        """Memory of the rank of ep whose experts get the tokens of all ranks, by pp coordinate."""
        work = replace(self.work, all_rows_arrive=True)
        return estimate_memory(work, self.optimizer, self.device_type)


def load_island(config: Config, index: int, memory_bytes: int | None = None) -> IslandConfig:
    """Return the config of one island, after all checks. Raises ConfigError.

    For settings that the island chooses itself (`island.auto`) the result has the first candidate
    whose inner step fits into `memory_bytes`, or the last candidate if none fits. Without a limit
    it has the first candidate.
    """
    count = max(1, len(config.islands))
    if index >= count:
        raise ConfigError(
            f"--island: got {index}; allowed: {', '.join(map(str, range(count)))}, the config's "
            "islands"
        )
    island = config.for_island(index)
    check_island(config.run, island, f"island {index}")
    *others, last = list_candidates(config.run, island)
    for each in others:
        memory = build_step_plan(config.run, each).memory
        if memory_bytes is None or max(stage.peak for stage in memory) <= memory_bytes:
            return each
    return last


def build_step_plan(run: RunConfig, island: IslandConfig) -> StepPlan:
    """Return the plan of an island's inner step; of a run with stages, in the stage whose steps
    need most memory.
    """
    return max(build_stage_plans(run, island), key=lambda plan: plan.peak if run.stages else 0)


def build_stage_plans(run: RunConfig, island: IslandConfig) -> list[StepPlan]:
    """Return the plan of an inner step in each stage; a run without stages has one plan."""
    longest = longest_sequence(run)
    return [
        _build_plan(at_stage(run, number), island, longest)
        for number in range(len(run.stages) or 1)
    ]


def _build_plan(run: RunConfig, island: IslandConfig, longest: int) -> StepPlan:
    degrees = resolve_degrees(island.mesh, island.ranks)
    vocab_size, is_assumed = vocabulary(run)
    device_type = "cpu" if island.device == "cpu" else "cuda"
    work = Workload(
        sizes=resolve_sizes(run.model, vocab_size),
        degrees=degrees,
        parallel=island.parallel.on_device(device_type, degrees.pp),
        seq_len=run.data.seq_len,
        longest_seq_len=longest,
        micro_batch=island.micro_batch,
        num_micro_batches=accumulation_steps(
            run.optimizer.tokens_per_step,
            run.data.seq_len,
            island.micro_batch,
            degrees.num_data_ranks,
        ),
        compute_itemsize=ITEMSIZES[island.resolve_compute_dtype(device_type)],
        deals_matrices=run.optimizer.name == "muon",
        balance=run.optimizer.balance,
    )
    return StepPlan(work, find_state_bytes(run.optimizer), device_type, is_assumed)


def vocabulary(run: RunConfig) -> tuple[int, bool]:
    """Return the vocabulary size, and whether it is assumed.

    For a tokenizer on the hub that is not on this machine, the preset's size is assumed.
    """
    name = run.data.tokenizer
    # A tokenizer file's fingerprint is a hash of its content; on the hub it is the name itself.
    if name == "bytes" or tokenizer_fingerprint(name) != name:
        return build_tokenizer(*run.data.tokenizer_choice).vocab_size, False
    if run.model.vocab_size is not None:
        return run.model.vocab_size, False
    if (known := known_vocab_size(name)) is not None:
        return known, False
    preset = PRESETS.get(run.model.preset or "")
    return preset.vocab_size if preset else BYTE_VOCAB_SIZE, True
