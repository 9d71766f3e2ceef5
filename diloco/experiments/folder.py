"""The folder of an experiment. It can be published whole: experiment.yaml needs no other file.

    FOLDER/experiment.yaml  summary.md  results.json  calibration.json  plots/*.png
           runs/LABEL-sSEED-ID/    config.yaml, records, log, and finished.json once the run is over

A run is found by its id, which is a hash of its config. A changed row therefore has new runs, and
an added row needs only its own runs.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diloco.config.schema import dump_config
from diloco.errors import FolderInUse
from diloco.experiments.definition.rows import Row, Rows, Run
from diloco.experiments.definition.schema import Experiment, dump_experiment
from diloco.experiments.results.run_result import RunResult, read_result
from diloco.records.run_folder import METRICS, RunFacts, write_facts
from inner.files import make_folder, try_lock, write_atomically

MOST_LABEL_CHARACTERS = 36
"""Longest name of a run."""
CHECKPOINTS = "checkpoints"


class ExperimentFolder:
    """The folder in which an experiment keeps its runs and its report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = path / "runs"
        self.plots = path / "plots"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Create the folder and lock it. Raises InputError if it cannot be written to, and
        FolderInUse if another command runs this experiment.
        """
        make_folder(self.path, "--out")
        lock = os.open(self.path / "lock", os.O_CREAT | os.O_WRONLY)
        try:
            if not try_lock(lock):
                raise FolderInUse(
                    f"another command runs the experiment in {str(self.path)!r}; wait for it, or "
                    "use --out FOLDER"
                )
            yield
        finally:
            os.close(lock)

    def keep(self, experiment: Experiment) -> None:
        """Write the experiment with all configs that it names."""
        write_atomically(self.path / "experiment.yaml", dump_experiment(experiment))

    def find(self, run: Run) -> Path | None:
        """Return the folder of a run; None if the run was never started."""
        return next(iter(sorted(self.runs.glob(f"*-{run.run_id}"))), None)

    def result(self, run: Run) -> RunResult | None:
        """Return the result of a run; None if it is not finished."""
        found = self.find(run)
        return None if found is None else read_result(found)

    def create(self, run: Run) -> Path:
        """Create the folder of a run with its config, and return it. An existing folder keeps its
        content to resume from.
        """
        folder = self.find(run) or self.runs / name_run(run)
        if not (folder / "config.yaml").exists():
            island = run.config.island.model_copy(update={"run_dir": str(self.runs)})
            config = run.config.model_copy(update={"name": folder.name, "island": island})
            facts = RunFacts(
                name=folder.name,
                num_params=run.row.num_params,
                num_islands=len(config.islands),
                total_steps=config.total_steps,
            )
            write_facts(folder, facts)
            write_atomically(folder / "config.yaml", dump_config(config))
        return folder

    def results(self, rows: Rows) -> dict[str, dict[int, RunResult]]:
        """Return the results of the finished runs, by the row's id and the seed."""
        found: dict[str, dict[int, RunResult]] = {}
        for run in order(rows.rows):
            if (result := self.result(run)) is not None:
                found.setdefault(run.row.row_id, {})[run.seed] = result
        return found


def order(rows: Sequence[Row]) -> list[Run]:
    """Return all runs, beginning with the first seed of each row, so that the whole table can be
    seen early.
    """
    most = max(len(row.seeds) for row in rows)
    return [
        row.run(row.seeds[index]) for index in range(most) for row in rows if index < len(row.seeds)
    ]


def name_run(run: Run) -> str:
    """Return a unique name of the run that describes it."""
    label = re.sub(r"[^a-z0-9.]+", "-", run.row.label.lower())[:MOST_LABEL_CHARACTERS].strip("-.")
    return f"{label}-s{run.seed}-{run.run_id}"


def metrics_of(folder: Path, run: Run) -> Path:
    """Return the path of the records of the run's first island."""
    return folder / run.config.for_island(0).label / METRICS


def remove_checkpoints(folder: Path, run: Run, *, keeps_one: bool) -> None:
    """Delete the checkpoints of a finished run. With `keeps_one` the newest checkpoint of the first
    island stays.
    """
    for index in range(len(run.config.islands)):
        saved = folder / run.config.for_island(index).label / CHECKPOINTS
        doomed = sorted(saved.glob("step-*"))[:-1] if keeps_one and index == 0 else [saved]
        for path in doomed:
            shutil.rmtree(path, ignore_errors=True)
