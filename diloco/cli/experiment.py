"""`diloco experiment`: many runs that belong together. Importing this does not import torch."""

from pathlib import Path
from typing import Annotated

import typer


def experiment(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="YAML file, for example configs/experiments/inner-steps.yaml."
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROW", help="Run only this row: its number, or a part of its name. Repeatable."
        ),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time (default: one for each core).")
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", "--dry-run", help="Only print the rows and how long they take. Starts no run."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the experiment (default: runs/experiments/NAME)."
        ),
    ] = None,
) -> None:
    """Run the missing runs of an experiment, and compare all runs: table, plots, summary.

    Each run has all of its islands in one process, on one core. The command may be stopped or
    killed at any time. The same command then continues from the checkpoints. If you add a row to
    FILE, only its runs are missing. docs/experiments.md describes the format of FILE.
    """
    from rich.console import Console

    from diloco.experiments.run import ExperimentRequest, run_experiment

    request = ExperimentRequest(only or (), at_once, plan, out)
    raise typer.Exit(run_experiment(file, request, Console()))
