"""The result of a finished run: its held-out losses and the bytes that it has sent. Does not import
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from diloco.experiments.definition.rows import Row, Run
from diloco.overview.traffic import data_parallel_bytes_per_step
from diloco.records.run_folder import IslandRecords, read_run
from diloco.report.summary import expert_figures, mean_of_known
from inner.errors import InputError
from inner.files import write_atomically

FINISHED = "finished.json"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The figures of one run."""

    curve: list[tuple[int, float]]
    """(tokens of all islands, held-out loss in nats per token) of each evaluation."""
    sent_bytes: float
    """Bytes that an island has sent in committed rounds, payload and protocol; a mean over the
    islands."""
    core_seconds: float
    """Processor time of the process that finished the run."""
    steps_timed: int
    """Inner steps that this process made: fewer than the run's steps if the run was stopped in
    between."""
    expert_load: float | None = None
    """Load of a layer's fullest expert (its tokens divided by the mean), over the second half of
    the steps; a mean over layers. None for a model without experts.
    """

    @property
    def loss(self) -> float:
        """The last held-out loss, in nats per token."""
        return self.curve[-1][1]


_PARSER = TypeAdapter(RunResult)


def measure_run(run_dir: Path, run: Run, *, core_seconds: float, steps_timed: int) -> RunResult:
    """Read the result of a run that is over from its records. Raises InputError if they hold no
    loss.
    """
    islands = read_run(run_dir).islands
    curve = build_curve(islands, run.config.outer.inner_steps * run.row.step_tokens)
    if not curve:
        raise InputError(
            f"{run_dir}: the run has ended without a held-out loss; see its metrics.jsonl"
        )
    sent = fmean(count_sent(island) for island in islands)
    load = mean_of_known(list(expert_figures(islands)["expert_loads"].values()))
    return RunResult(
        curve=curve,
        sent_bytes=sent,
        core_seconds=core_seconds,
        steps_timed=steps_timed,
        expert_load=load,
    )


def build_curve(islands: Sequence[IslandRecords], tokens_per_cycle: int) -> list[tuple[int, float]]:
    """Return (tokens, loss) of each evaluation, averaged over islands. A resumed run has evaluated
    some rounds twice.
    """
    by_cycle: dict[int, dict[str, float]] = {}
    for island in islands:
        for record in island.evals:
            if record.loss is not None:
                by_cycle.setdefault(record.round, {})[island.name] = record.loss
    return [
        (cycle * tokens_per_cycle, fmean(losses.values()))
        for cycle, losses in sorted(by_cycle.items())
    ]


def count_sent(island: IslandRecords) -> int:
    """Return the bytes that the island sent in committed rounds. Of a round repeated after a stop,
    the last one counts.
    """
    return sum(
        {record.round: record.bytes_sent for record in island.rounds if record.committed}.values()
    )


def data_parallel_bytes(row: Row, num_machines: int) -> float:
    """Return the bytes that one of `num_machines` machines sends in data-parallel training.

    Each step has a ring all-reduce in bf16.
    """
    return data_parallel_bytes_per_step(row.num_params, num_machines) * row.config.total_steps


def write_result(run_dir: Path, result: RunResult) -> None:
    """Mark the run as finished, with its result."""
    write_atomically(run_dir / FINISHED, _PARSER.dump_json(result, indent=1).decode() + "\n")


def read_result(run_dir: Path) -> RunResult | None:
    """Return the result of a finished run; None if it is not finished. Raises InputError if the
    file is damaged.
    """
    path = run_dir / FINISHED
    try:
        return _PARSER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise InputError(
            f"{path} is damaged: {problem}; delete it, and the run resumes from its last checkpoint"
        ) from None
