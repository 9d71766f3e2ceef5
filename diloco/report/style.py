"""The style of the report's plots, and how a figure is created and saved."""

from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from inner.files import write_atomically

# Okabe and Ito's palette, which is safe for common colour blindness. Vermillion is reserved for
# errors.
ISLAND_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7A5C00")
WRONG = "#D55E00"
INK = "#22252B"
FAINT = "#E4E6EA"
REFERENCE = "#5C6370"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9AA0AA",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": REFERENCE,
    "ytick.color": REFERENCE,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}


def plot_style() -> AbstractContextManager[None]:
    """Return a context in which plots do not depend on the user's own matplotlib settings."""
    return style.context(["default", STYLE])


def new_axes(title: str, x_label: str, y_label: str, height: float = 4.6) -> tuple[Figure, Axes]:
    """Create a figure with empty axes in the report's style. `height` is in inches."""
    figure = Figure(figsize=(9.6, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=x_label == "inner step", nbins=9))
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write the picture as a whole: a killed process leaves no partial file under its name."""
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())
