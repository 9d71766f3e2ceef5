"""Write the report of an experiment: the table, the plots and the summary of the finished runs."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from diloco.experiments.definition.rows import Rows
from diloco.experiments.definition.schema import Experiment
from diloco.experiments.folder import ExperimentFolder, order
from diloco.experiments.forecast import Cost, kind_of
from diloco.experiments.results.plots import write_plots
from diloco.experiments.results.summary import SUMMARY, write_summary
from diloco.experiments.results.table import TableLine, build_table, format_table
from diloco.experiments.results.wall_clock import Machines, seconds_per_step
from diloco.formatting import align, parse_bits_per_second, parse_seconds
from diloco.planning.predict import LinkSpeed

Costs = Mapping[str, Cost]
"""Costs by the kind of inner step."""


def write_report(
    folder: ExperimentFolder, experiment: Experiment, rows: Rows, costs: Costs
) -> list[TableLine]:
    """Write the summary and the plots of the finished runs. Return the table's lines; none if no
    run is finished.
    """
    results = folder.results(rows)
    if not results:
        return []
    machines, seconds = simulate_seconds(experiment, rows, costs)
    lines = build_table(rows, results, seconds, machines)
    link = f"{experiment.report.link}, {experiment.report.rtt}"
    plots = write_plots(lines, folder.plots, experiment.report.against, link)
    missing = len(order(rows.rows)) - sum(map(len, results.values()))
    notes = [f"{missing} runs are missing."] if missing else []
    notes.append(describe_clock(experiment, machines))
    write_summary(folder.path, experiment, rows, lines, plots, notes)
    return lines


def print_report(folder: ExperimentFolder, lines: Sequence[TableLine], console: Console) -> None:
    """Print the table and the path of the full report."""
    if not lines:
        console.print("no run is finished yet")
        return
    for text in align(format_table(lines)):
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    console.print(f"report: {folder.path / SUMMARY}", soft_wrap=True)


def simulate_seconds(
    experiment: Experiment, rows: Rows, costs: Costs
) -> tuple[int, dict[str, float]]:
    """Return the number of machines for data-parallel training, and seconds per step with
    communication by row id.
    """
    num_machines = max(len(row.config.islands) for row in rows.rows)
    link = LinkSpeed(
        parse_bits_per_second(experiment.report.link), parse_seconds(experiment.report.rtt)
    )
    machines = Machines(num_machines, link)
    found = {}
    for row in rows.rows:
        step = experiment.report.step_seconds
        if step is None:
            step = costs[kind_of(row.config)].step / (num_machines if row.is_data_parallel else 1)
        found[row.row_id] = seconds_per_step(row, step, machines)
    return num_machines, found


def describe_clock(experiment: Experiment, num_machines: int) -> str:
    """Return a text about how the simulated wall clock is computed."""
    settings = experiment.report
    step = (
        "as long as on one core of this machine"
        if settings.step_seconds is None
        else f"{settings.step_seconds:g} s"
    )
    return (
        f"Simulated time: one machine for each island, {num_machines} for data-parallel training, "
        f"links of {settings.link} and {settings.rtt}; an inner step takes {step}; rounds take "
        "what the formulas of `diloco plan` predict, without evaluations."
    )
