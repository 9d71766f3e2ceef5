"""Draws the plots of docs/results.md from its own tables, so that plot and table cannot differ.

python -m scripts.results_plots [--into FOLDER]
"""

import argparse
import re
from itertools import dropwhile, takewhile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.report.style import ISLAND_COLORS, REFERENCE, WRONG, new_axes, plot_style, save

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"
Table = list[list[str]]


def read_table(page: str, heading: str) -> Table:
    """Return the rows of the first table below a heading, without its two header lines.

    Bold type is removed from the cells.
    """
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    below = dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    lines = list(takewhile(lambda line: line.startswith("|"), below))
    return [
        [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
        for line in lines[2:]
    ]


def numbers(text: str) -> list[float]:
    """Return all numbers in a cell."""
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", text)]


def draw_faults(rows: Table) -> Figure:
    """Draw the held-out loss of each seed: without faults, with them, and on as few tokens."""
    figure, axes = new_axes("Faults and the loss", "seed", "held-out loss (nats per token)")
    kinds = [
        ("no fault", 1, ISLAND_COLORS[0]),
        ("in the storm", 2, WRONG),
        ("no fault, stopped after as many tokens", 7, REFERENCE),
    ]
    for label, column, color in kinds:
        values = [numbers(row[column])[0] for row in rows]
        axes.plot(range(len(rows)), values, "o", color=color, markersize=9, label=label)
    _name_ticks(axes, [row[0] for row in rows])
    axes.legend(loc="upper left")
    axes.set_ylim(1.5, None)
    return figure


def draw_unequal(rows: Table) -> Figure:
    """Draw held-out loss and seconds of each run, two for each method."""
    figure, axes = new_axes(
        "Islands of speeds 1, 1, 1/2 and 1/4", "seconds", "held-out loss (nats per token)"
    )
    for row, color in zip(rows, ISLAND_COLORS, strict=False):
        (first, first_seconds), (second, second_seconds) = numbers(row[2]), numbers(row[3])
        axes.plot(first_seconds, first, "o", color=color, markersize=9, label=row[0])
        axes.plot(second_seconds, second, "s", color=color, markersize=9)
    axes.set_xlim(0, None)
    axes.legend(loc="lower left", title="circles: seed 0, squares: seed 1")
    return figure


def draw_sizes(rows: Table) -> Figure:
    """Draw held-out loss against parameters: data-parallel, DiLoCo, and predictions.

    The gap is written beside DiLoCo's points.
    """
    figure, axes = new_axes(
        "20 tokens per parameter, four islands", "parameters", "held-out loss (nats per token)"
    )
    axes.set_xscale("log")
    sizes = [size_of(row[0]) for row in rows]
    for column, label, color in (
        (3, "data-parallel AdamW", REFERENCE),
        (4, "DiLoCo, Nesterov 0.7/0.9, with its gap", ISLAND_COLORS[0]),
        (6, "DiLoCo, Nesterov 1/0.6", ISLAND_COLORS[1]),
    ):
        points = [
            (size, numbers(row[column])[0])
            for size, row in zip(sizes, rows, strict=True)
            if row[column] != "-"
        ]
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=6, label=label)
    predicted = [
        (size, loss) for size, row in zip(sizes, rows, strict=True) for loss in numbers(row[8])
    ]
    axes.plot(
        *zip(*predicted, strict=True),
        "x",
        color=WRONG,
        markersize=9,
        label="predicted before they ran",
    )
    for size, row in zip(sizes, rows, strict=True):
        above = {"xytext": (4, 8), "textcoords": "offset points", "color": ISLAND_COLORS[0]}
        axes.annotate(row[5].split(" %")[0] + " %", (size, numbers(row[4])[0]), **above)
    axes.set_xticks(sizes, [row[0] for row in rows])
    axes.minorticks_off()
    axes.legend(loc="upper right")
    return figure


def size_of(text: str) -> float:
    """Parse a number of parameters such as 40.3k or 1.00M."""
    return numbers(text)[0] * (1e6 if text.endswith("M") else 1e3)


def draw_fine_tuning(rows: Table) -> Figure:
    """Draw loss of the source text against loss of the English.

    Arrows lead from before fine-tuning to after it.
    """
    figure, axes = new_axes(
        "Fine-tuned on English", "loss of the English", "loss of the source text"
    )
    for kind, color in (("data-parallel", REFERENCE), ("DiLoCo", ISLAND_COLORS[0])):
        starts = []
        ends = []
        for row in (row for row in rows if row[1] == kind):
            (english, english_after), (source, source_after) = numbers(row[2]), numbers(row[4])
            starts.append((english, source))
            ends.append((english_after, source_after))
            axes.annotate(
                "",
                ends[-1],
                starts[-1],
                arrowprops={"arrowstyle": "->", "color": color, "shrinkA": 5},
            )
        axes.plot(
            *zip(*starts, strict=True), "o", color=color, markersize=8, label=f"{kind}, before"
        )
        axes.plot(*zip(*ends, strict=True), "s", color=color, markersize=8, label=f"{kind}, after")
    axes.legend(loc="upper right")
    return figure


def draw_momentum(rows: Table) -> Figure:
    """Draw held-out loss against the learning rate, of the two inner optimizers with four rates."""
    figure, axes = new_axes(
        "A slow moment inside", "learning rate", "held-out loss (nats per token)"
    )
    axes.set_xscale("log")
    for first, label, color in (
        (0, "AdamW", REFERENCE),
        (4, "slow moment and gradient", ISLAND_COLORS[0]),
    ):
        chosen = rows[first : first + 4]
        rates = [numbers(row[1])[0] for row in chosen]
        for column, style, who in ((2, "o--", "data-parallel"), (3, "s-", "four islands")):
            losses = [numbers(row[column])[0] for row in chosen]
            axes.plot(rates, losses, style, color=color, markersize=8, label=f"{label}, {who}")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.legend(loc="upper right")
    return figure


def _name_ticks(axes: Axes, names: list[str]) -> None:
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)


DRAWN = {
    "sizes": ("Sizes, and two predictions", draw_sizes),
    "faults": ("Faults and the loss", draw_faults),
    "unequal": ("Islands of unequal speed", draw_unequal),
    "fine-tuning": ("After pre-training", draw_fine_tuning),
    "momentum": ("A slow moment inside", draw_momentum),
}
"""For each picture, by its name: the section with the table, and the function that draws it."""


def draw_all(folder: Path) -> list[Path]:
    """Draw each picture into the folder, and return their paths."""
    page = PAGE.read_text()
    paths = [folder / f"{name}.png" for name in DRAWN]
    with plot_style():
        for path, (heading, draw) in zip(paths, DRAWN.values(), strict=True):
            save(draw(read_table(page, heading)), path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--into", type=Path, default=IMAGES, metavar="FOLDER", help="default: docs/images"
    )
    for picture in draw_all(parser.parse_args().into):
        print(picture)
