"""`diloco experiment FILE`: print the forecast, run what is missing, write the report. Read this
file first.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from diloco.config.own_code import provide_own_code
from diloco.experiments.definition.build import build_rows
from diloco.experiments.definition.rows import Rows, Run, select
from diloco.experiments.definition.schema import Experiment, load_experiment
from diloco.experiments.folder import ExperimentFolder, order
from diloco.experiments.forecast import Forecast, calibrate, forecast, wall_seconds
from diloco.experiments.pool import RunPool, clean
from diloco.experiments.results.run_result import RunResult
from diloco.formatting import align, human_count, human_seconds
from diloco.runtime.devices.gpus import list_gpus

INTERRUPTED = 130


@dataclass(frozen=True)
class ExperimentRequest:
    """Flags of the command line."""

    only: Sequence[str] = ()
    """Numbers of rows, or parts of their labels; empty: all rows."""
    at_once: int | None = None
    """Number of runs at the same time; null: one per core, or a single one if runs use a GPU."""
    is_plan: bool = False
    """Only print which runs are missing and how long they take."""
    out: Path | None = None
    """Folder of the experiment; None: experiments/NAME in the run_dir of its config."""


def run_experiment(path: Path, request: ExperimentRequest, console: Console) -> int:
    """Run the experiment. Return exit status 0 if no run failed, else 1; 130 if interrupted. Raises
    ConfigError.
    """
    experiment = load_experiment(path)
    rows = build_rows(experiment)
    for row in rows.rows:
        provide_own_code(row.config.run)
    chosen = select(rows.rows, list(request.only))
    folder = ExperimentFolder(request.out or default_folder(experiment, rows))
    at_once = request.at_once or count_at_once(rows)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        with nullcontext() if request.is_plan else folder.hold():
            costs = calibrate(rows.rows, folder.path)
            results = folder.results(rows)
            missing = [
                run for run in order(chosen) if run.seed not in results.get(run.row.row_id, {})
            ]
            expected = forecast(rows.rows, results, costs)
            print_plan(rows, results, expected, console)
            print_length(missing, expected, at_once, console)
            if request.is_plan:
                return 0
            # Imported late because it imports torch and matplotlib.
            from diloco.experiments import report

            def after(run: Run) -> None:
                clean(folder, run, keeps_one=experiment.keep_checkpoints)
                report.write_report(folder, experiment, rows, costs)

            folder.keep(experiment)
            pool = RunPool(folder, missing, at_once, console)
            pool.work(expected, after)
            report.print_report(
                folder, report.write_report(folder, experiment, rows, costs), console
            )
            return 1 if pool.failed else 0
    except KeyboardInterrupt:
        console.print(
            f"stopped; the same command continues from here: {folder.path}", soft_wrap=True
        )
        return INTERRUPTED


def default_folder(experiment: Experiment, rows: Rows) -> Path:
    """Return the folder of an experiment if the command line names none."""
    return rows.rows[0].config.island.runs / "experiments" / experiment.name


def count_at_once(rows: Rows) -> int:
    """Return the number of runs at the same time: one per core, or one in all if runs use a GPU."""
    devices = {row.config.for_island(0).device for row in rows.rows}
    if "cuda" in devices or ("auto" in devices and list_gpus()):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_plan(
    rows: Rows, results: dict[str, dict[int, RunResult]], expected: Forecast, console: Console
) -> None:
    """Print every row with its size, its finished runs and the time of one run."""
    lines = [
        ("row", "number", "parameters", "tokens", "steps", "runs done", "core-minutes per run")
    ]
    for number, row in enumerate(rows.rows, 1):
        steps = row.config.total_steps
        done = f"{len(results.get(row.row_id, {}))} of {len(row.seeds)}"
        size = human_count(row.num_params), human_count(steps * row.step_tokens), str(steps)
        lines.append(
            (row.label, str(number), *size, done, f"{expected.core_seconds[row.row_id] / 60:.1f}")
        )
    for text in align(lines):
        console.print(text, soft_wrap=True, highlight=False, markup=False)


def print_length(
    missing: Sequence[Run], expected: Forecast, at_once: int, console: Console
) -> None:
    """Print how long the missing runs take, and where the times come from."""
    seconds = sum(expected.core_seconds[run.row.row_id] for run in missing)
    wall = human_seconds(wall_seconds(missing, expected, at_once))
    text = (
        f"{len(missing)} runs to make: {seconds / 60:.1f} core-minutes, about {wall} with "
        f"{at_once} at once"
    )
    console.print(f"{text}; times are {expected.source}", soft_wrap=True, highlight=False)
