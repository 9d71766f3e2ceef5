"""The table of an experiment: one line per row, with the results of its runs so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from diloco.experiments.definition.rows import Row, Rows
from diloco.experiments.results.comparison import Estimate, compare, spread
from diloco.experiments.results.run_result import RunResult, data_parallel_bytes
from diloco.formatting import UNKNOWN, human_bytes, human_loss, human_seconds
from diloco.report.summary import mean_of_known

Results = Mapping[str, Mapping[int, RunResult]]
"""Results of finished runs, by the row's id and the seed."""
HEADINGS = (
    "row",
    "seeds",
    "held-out loss",
    "spread",
    "to the baseline",
    "sent by an island",
    "simulated time",
)


@dataclass(frozen=True, kw_only=True)
class TableLine:
    """One row of an experiment with its results. Losses are in nats per token."""

    row: Row
    curve: list[tuple[int, float]]
    """(tokens, mean loss over the seeds)."""
    losses: dict[int, float]
    """The last loss by seed."""
    difference: Estimate | None
    """Loss relative to the baseline, over the seeds that both have; None without a baseline and for
    the baseline itself."""
    sent_bytes: float
    seconds: float
    """Duration of the whole run on the simulated wall clock."""
    expert_load: float | None = None
    """`RunResult.expert_load`, the mean over the seeds; None for a model without experts."""

    @property
    def loss(self) -> float:
        return fmean(self.losses.values())

    @property
    def spread(self) -> float | None:
        return spread(list(self.losses.values()))


def build_table(
    rows: Rows, results: Results, step_seconds: Mapping[str, float], num_machines: int
) -> list[TableLine]:
    """Return a line for each row with a finished run. `step_seconds`: simulated seconds per step,
    by the row's id.
    """
    return [
        build_line(
            row, rows.baselines.get(row.row_id), results, step_seconds[row.row_id], num_machines
        )
        for row in rows.rows
        if results.get(row.row_id)
    ]


def build_line(
    row: Row, baseline: Row | None, results: Results, step_seconds: float, num_machines: int
) -> TableLine:
    """Return the line of a row that has a finished run."""
    found = results[row.row_id]
    losses = {seed: result.loss for seed, result in sorted(found.items())}
    difference = None
    if baseline is not None and baseline.row_id != row.row_id:
        others = results.get(baseline.row_id, {})
        difference = compare(losses, {seed: result.loss for seed, result in others.items()})
    sent = fmean(result.sent_bytes for result in found.values())
    return TableLine(
        row=row,
        curve=mean_curve(found),
        losses=losses,
        difference=difference,
        sent_bytes=data_parallel_bytes(row, num_machines) if row.is_data_parallel else sent,
        seconds=step_seconds * row.config.total_steps,
        expert_load=mean_of_known([result.expert_load for result in found.values()]),
    )


def mean_curve(results: Mapping[int, RunResult]) -> list[tuple[int, float]]:
    """Return (tokens, mean loss) at each evaluation that every seed has."""
    curves = [dict(result.curve) for result in results.values()]
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [(tokens, fmean(curve[tokens] for curve in curves)) for tokens in common]


def format_table(lines: Sequence[TableLine]) -> list[tuple[str, ...]]:
    """Return the cells of the table: HEADINGS, then each line. With a mixture of experts there is a
    column with the load of a layer's fullest expert.
    """
    if all(line.expert_load is None for line in lines):
        return [HEADINGS, *map(format_line, lines)]
    loads = [UNKNOWN if line.expert_load is None else f"{line.expert_load:.2f}" for line in lines]
    return [
        (*HEADINGS, "fullest expert"),
        *((*format_line(line), load) for line, load in zip(lines, loads, strict=True)),
    ]


def format_line(line: TableLine) -> tuple[str, ...]:
    """Return the cells of a line, in the order of HEADINGS."""
    return (
        line.row.label,
        str(len(line.losses)),
        human_loss(line.loss),
        human_loss(line.spread),
        format_difference(line.difference),
        human_bytes(line.sent_bytes),
        human_seconds(line.seconds),
    )


def format_difference(difference: Estimate | None) -> str:
    """Return text such as `+2.9 % [+2.1, +3.7]`, with the confidence interval in brackets."""
    if difference is None:
        return UNKNOWN
    mean = 100 * difference.mean
    if difference.half_width is None:
        return f"{mean:+.2f} %"
    reach = 100 * difference.half_width
    return f"{mean:+.2f} % [{mean - reach:+.2f}, {mean + reach:+.2f}]"
