"""The README's table and picture of an experiment, from the results of its finished runs that are
kept in git.

python -m scripts.readme_figures      # prints the table, draws docs/images/ten-minutes.png
"""

import argparse
import tempfile
from pathlib import Path

from diloco.experiments.definition.build import build_rows
from diloco.experiments.definition.schema import load_experiment
from diloco.experiments.folder import ExperimentFolder
from diloco.experiments.report import simulate_seconds
from diloco.experiments.results.plots import write_plots
from diloco.experiments.results.table import TableLine, build_table, format_difference
from diloco.formatting import human_bytes, human_loss
from scripts.finished_runs import restore

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "configs" / "experiments" / "ten-minutes.yaml"
FINISHED = ROOT / "configs" / "experiments" / "finished" / "ten-minutes.json"
IMAGES = ROOT / "docs" / "images"
PLOT = "loss-bytes.png"
PICTURE = "ten-minutes.png"


def read_lines(folder: Path) -> list[TableLine]:
    """Return the table of the finished runs.

    `folder` must be empty, and holds the runs afterwards.
    """
    restore(FINISHED, folder)
    experiment = load_experiment(FILE)
    rows = build_rows(experiment)
    machines, seconds = simulate_seconds(experiment, rows, {})
    return build_table(rows, ExperimentFolder(folder).results(rows), seconds, machines)


def format_table(lines: list[TableLine]) -> str:
    """Return the table in Markdown.

    Bytes are also given as a share of the bytes of data-parallel training, which is the first row.
    """
    whole = lines[0].sent_bytes
    text = [
        "| row | held-out loss, three seeds | to data-parallel | sent by an island |",
        "|---|---:|---:|---:|",
    ]
    for line in lines:
        share = f" (1/{whole / line.sent_bytes:.0f})" if line is not lines[0] else ""
        cells = (line.row.label, human_loss(line.loss), format_difference(line.difference))
        text.append(f"| {' | '.join(cells)} | {human_bytes(line.sent_bytes)}{share} |")
    return "\n".join(text)


def draw(lines: list[TableLine], folder: Path, into: Path) -> Path:
    """Draw held-out loss against the bytes that an island sends. Returns the picture's path."""
    write_plots(lines, folder / "plots", None, "20mbit, 50ms")
    picture = into / PICTURE
    picture.write_bytes((folder / "plots" / PLOT).read_bytes())
    return picture


def main() -> None:
    """Print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=IMAGES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = read_lines(Path(folder))
        print(format_table(lines))
        print(draw(lines, Path(folder), options.into))


if __name__ == "__main__":
    main()
