"""The plot of the home page: that of the README, with words that can be read on a phone."""

import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from diloco.experiments.results.plots import ABSCISSAE, curve_points
from diloco.report.style import ISLAND_COLORS, REFERENCE
from scripts.docs_figures import narrow_axes
from scripts.readme_figures import read_lines

NAMES = {
    "data-parallel AdamW": "data-parallel",
    "Nesterov 0.7/0.9, H 30, 4 islands, bf16": "four islands, bf16",
    "Nesterov 0.7/0.9, H 30, 4 islands, int4": "four islands, int4",
    "plain averaging, H 30, 4 islands, bf16": "plain averaging",
}
"""Short names of the rows of the experiment."""


def draw_bytes() -> Figure:
    """Held-out loss against the bytes that an island has sent, from the kept runs of the README's
    experiment.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = read_lines(Path(folder))
    sent = next(each for each in ABSCISSAE if each.stem == "bytes")
    figure, axes = narrow_axes(
        "Loss against bytes", "bytes that an island sends", "held-out loss, nats per token"
    )
    for line, color in zip(lines, [REFERENCE, *ISLAND_COLORS], strict=False):
        points = curve_points(line, sent)
        label = f"{NAMES[line.row.label]}: {line.loss:.3f}"
        axes.plot(*zip(*points, strict=True), "o-", color=color, ms=3, label=label)
    axes.set_xscale("log")
    axes.set_xticks([1e6, 1e7, 1e8], ["1 MB", "10 MB", "100 MB"])
    axes.minorticks_off()
    axes.set_ylim(1.6, 3.2)
    axes.legend(loc="upper right", fontsize=9)
    return figure
