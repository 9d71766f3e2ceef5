"""Write summary.md and results.json of an experiment."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.experiments.definition.rows import Rows, describe_point
from diloco.experiments.definition.schema import Experiment
from diloco.experiments.results.comparison import CONFIDENCE
from diloco.experiments.results.table import TableLine, format_table
from diloco.formatting import human_count
from inner.files import write_atomically

SUMMARY = "summary.md"
RESULTS = "results.json"


def write_summary(
    folder: Path,
    experiment: Experiment,
    rows: Rows,
    lines: Sequence[TableLine],
    plots: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Write both files. `notes`: lines for the summary, about missing runs and how the time was
    simulated.
    """
    text = [
        f"# {experiment.name}",
        "",
        *([experiment.about.strip(), ""] if experiment.about else []),
    ]
    text += [
        *markdown_table(lines),
        "",
        explain_table(experiment, rows),
        "",
        *(f"- {note}" for note in notes),
        "",
    ]
    text += [f"![{name}](plots/{name})\n" for name in plots]
    text += ["## Again", "", f"    diloco experiment {folder / 'experiment.yaml'} --out FOLDER", ""]
    text += ["`runs/` has the exact config and the records of each run, by row and seed:", ""]
    text += [f"- {line.row.label}: `{line.row.row_id}`, {describe_length(line)}" for line in lines]
    write_atomically(folder / SUMMARY, "\n".join(text) + "\n")
    content = {"name": experiment.name, "rows": [as_json(line, rows) for line in lines]}
    write_atomically(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False) + "\n")


def markdown_table(lines: Sequence[TableLine]) -> list[str]:
    """Return the table as lines of text."""
    headings, *rows = format_table(lines)
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in [headings, marks, *rows]]


def explain_table(experiment: Experiment, rows: Rows) -> str:
    """Return a text that explains the columns."""
    text = (
        "Losses are held-out, in nats per token, at the end of the run; the spread is the standard "
        "deviation over the seeds. "
    )
    if (point := experiment.baseline_point) is not None:
        labels = {row.label for row in rows.baselines.values()}
        other = f"the row with {describe_point(point)} and otherwise equal settings"
        text += (
            f"The difference is to {labels.pop() if len(labels) == 1 else other}, over pairs of "
            "equal seeds, in "
            f"brackets with its {CONFIDENCE:.0%} confidence interval (Student's t). "
        )
    return text + (
        "Bytes count committed rounds, payload and protocol; for data-parallel training they count "
        "a bf16 ring "
        f"all-reduce at every step. Run on {platform.machine()} with {os.cpu_count()} processors."
    )


def describe_length(line: TableLine) -> str:
    """Return a text with the run's length and the model's size."""
    row = line.row
    tokens = row.config.total_steps * row.step_tokens
    return (
        f"{human_count(row.num_params)} parameters, {human_count(tokens)} tokens in "
        f"{row.config.total_steps} steps"
    )


def as_json(line: TableLine, rows: Rows) -> Mapping[str, Any]:
    """Return all figures of a row."""
    row = line.row
    difference = line.difference
    baseline = rows.baselines.get(line.row.row_id)
    return {
        "label": row.label,
        "id": row.row_id,
        "point": {key: value for key, value in row.point.items() if key != "config"},
        "num_params": row.num_params,
        "tokens": row.config.total_steps * row.step_tokens,
        "losses": {str(seed): loss for seed, loss in line.losses.items()},
        "loss": line.loss,
        "spread": line.spread,
        "baseline": baseline.label if baseline is not None else None,
        "difference": difference.mean if difference else None,
        "difference_half_width": difference.half_width if difference else None,
        "sent_bytes": line.sent_bytes,
        "simulated_seconds": line.seconds,
        "curve": line.curve,
    }
