"""Axes whose words can be read on a phone."""

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def narrow_axes(title: str, x_label: str, y_label: str, height: float = 3.8) -> tuple[Figure, Axes]:
    """A figure with empty axes, as wide as a phone. `height` is in inches."""
    figure = Figure(figsize=(5.0, height), dpi=190, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label)
    return figure, axes
