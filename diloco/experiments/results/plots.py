"""The plots of an experiment: held-out loss against tokens, bytes and simulated wall clock, and
last losses.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from diloco.experiments.definition.rows import Row
from diloco.experiments.results.table import TableLine
from diloco.formatting import human_bytes, human_count, human_seconds
from diloco.report.style import ISLAND_COLORS, REFERENCE, new_axes, plot_style, save

LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
SHOWN_FROM = 0.1
"""Plots begin at this share of the tokens. The losses before it are so high that they would hide
later differences."""
RATIO_OF_LOG = 8.0
"""An axis whose values differ by more than this factor is logarithmic."""


@dataclass(frozen=True)
class Abscissa:
    """The horizontal axis of a plot: `value` gives the value of a line when `share` of its run is
    done.
    """

    stem: str
    title: str
    label: str
    value: Callable[[TableLine, float], float]
    format: Callable[[float], str]


ABSCISSAE = (
    Abscissa("tokens", "Held-out loss against tokens", "tokens, all islands "
                                                       "together", lambda line, share: (
        share * line.curve[-1][0]
    ), human_count),
    Abscissa("bytes", "Held-out loss against bytes", "bytes sent by one "
                                                     "island", lambda line, share: (
        share * line.sent_bytes
    ), human_bytes),
    Abscissa("wall-clock", "Held-out loss against simulated wall "
                           "clock", "time, simulated", lambda line, share: (
        share * line.seconds
    ), human_seconds),
)  # fmt: skip


def write_plots(
    lines: Sequence[TableLine], folder: Path, against: str | None, link: str
) -> list[str]:
    """Draw every plot, one file for each size of the model. Return the names of the files."""
    names = []
    sizes = sorted({line.row.num_params for line in lines})
    with plot_style():
        for size in sizes:
            group = [line for line in lines if line.row.num_params == size]
            suffix = f"-{human_count(size)}" if len(sizes) > 1 else ""
            for abscissa in ABSCISSAE:
                if draw_curves(
                    group,
                    abscissa,
                    folder / f"loss-{abscissa.stem}{suffix}.png",
                    suffix.strip("-"),
                    link,
                ):
                    names.append(f"loss-{abscissa.stem}{suffix}.png")
        if against is not None and draw_last_losses(lines, against, folder / "last-loss.png"):
            names.append("last-loss.png")
    return names


def draw_curves(
    lines: Sequence[TableLine], abscissa: Abscissa, path: Path, size: str, link: str
) -> bool:
    """Draw the losses of rows with one model size. Return False, and draw nothing, if no row has a
    value on the axis.
    """
    drawn = [(line, points) for line in lines if (points := curve_points(line, abscissa))]
    if not drawn:
        return False
    title = (
        abscissa.title
        + (f", {link}" if abscissa.stem == "wall-clock" else "")
        + (f", {size}" if size else "")
    )
    figure, axes = new_axes(
        title, abscissa.label, "loss, nats per token", height=4.6 + 0.16 * len(drawn)
    )
    for index, (line, points) in enumerate(drawn):
        axes.plot(
            *zip(*points, strict=True),
            label=f"{line.row.label}  {line.loss:.3f}",
            **line_style(index, line.row),
        )
    late = [
        loss
        for line, _ in drawn
        for tokens, loss in line.curve
        if tokens >= SHOWN_FROM * line.curve[-1][0]
    ]
    low = min(late)
    high = max(late)
    axes.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3)
    fit_axis(axes, [x for _, points in drawn for x, _ in points[-1:]], abscissa.format)
    figure.legend(loc="outside lower center", ncols=1 if longest(lines) > 60 else 2, fontsize=8)
    save(figure, path)
    return True


def curve_points(line: TableLine, abscissa: Abscissa) -> list[tuple[float, float]]:
    """Return (value, loss) of each evaluation; empty if all values are 0."""
    last = line.curve[-1][0]
    points = (
        [(abscissa.value(line, tokens / last), loss) for tokens, loss in line.curve] if last else []
    )
    return [point for point in points if point[0] > 0]


def fit_axis(axes: Axes, ends: Sequence[float], text: Callable[[float], str]) -> None:
    """Make the axis logarithmic if the lines' ends are far apart, and label it with units."""
    if max(ends) > RATIO_OF_LOG * min(ends):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def draw_last_losses(lines: Sequence[TableLine], key: str, path: Path) -> bool:
    """Draw last losses against a key, with bars from the best to the worst seed. Return False if no
    row has a number.
    """
    level = [line for line in lines if is_level(line.row, key)]
    groups: dict[str, list[TableLine]] = {}
    for line in lines:
        if line not in level and isinstance(line.row.value(key), int | float):
            groups.setdefault(group_of(line.row, key), []).append(line)
    if not groups:
        return False
    figure, axes = new_axes(
        f"Last held-out loss against {key}", key, "loss, nats per token", 4.6 + 0.16 * len(groups)
    )
    for index, members in enumerate(groups.values()):
        draw_group(axes, sorted(members, key=lambda line: line.row.value(key)), key, index)
    for line in level:
        axes.axhline(line.loss, color=REFERENCE, linestyle=":", label=line.row.label)
    values = sorted({line.row.value(key) for members in groups.values() for line in members})
    if values[0] > 0 and values[-1] >= RATIO_OF_LOG * values[0]:
        axes.set_xscale("log")
    axes.set_xticks(
        values, labels=[human_count(value) if value > 1000 else f"{value:g}" for value in values]
    )
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=1 if longest(lines) > 60 else 2, fontsize=8)
    save(figure, path)
    return True


def draw_group(axes: Axes, members: Sequence[TableLine], key: str, index: int) -> None:
    """Draw the rows that differ only in the key. Their name is the longest label, without the key's
    value.
    """
    values = [line.row.value(key) for line in members]
    means = [line.loss for line in members]
    bars = [[abs(end(line.losses.values()) - line.loss) for line in members] for end in (min, max)]
    name = max((name_without(line.row, key) for line in members), key=len)
    axes.errorbar(values, means, bars, label=name, capsize=3, **line_style(index, members[0].row))


def is_level(row: Row, key: str) -> bool:
    """Return whether the row does not depend on the key: data-parallel training has neither islands
    nor rounds.
    """
    return row.is_data_parallel and (key == "islands" or key.startswith("outer."))


def group_of(row: Row, key: str) -> str:
    """Return a key that is equal for rows that differ only in `key`.

    `params` follows from the keys of the model, which are therefore left out with it. Seeds are
    left out too, because larger models often have fewer seeds.
    """
    leaves_out = ("model" if key == "params" else key, "seeds")
    rest = {name: value for name, value in row.point.items() if not name.startswith(leaves_out)}
    return json.dumps([row.is_data_parallel, rest], sort_keys=True, default=str)


def name_without(row: Row, key: str) -> str:
    """Return the row's label without the value of a key."""
    value = row.value(key)
    words = {f"H {value}", f"{key.rpartition('.')[2].replace('_', ' ')} {value:g}"}
    words = {f"{human_count(value)} params"} if key == "params" else words
    if key == "islands":
        words = {f"{value} islands", f"{value} island"}
    if key == "step_tokens":
        words = {f"{value} tokens per step"}
    return ", ".join(word for word in row.label.split(", ") if word not in words)


def line_style(index: int, row: Row) -> dict[str, Any]:
    """Return the colour and dashes of line `index`; data-parallel training is grey."""
    style = LINE_STYLES[index // len(ISLAND_COLORS) % len(LINE_STYLES)]
    color = REFERENCE if row.is_data_parallel else ISLAND_COLORS[index % len(ISLAND_COLORS)]
    return {"color": color, "linestyle": style, "linewidth": 1.8, "marker": "o", "markersize": 3}


def longest(lines: Sequence[TableLine]) -> int:
    """Return the number of characters of the longest label."""
    return max(len(line.row.label) for line in lines)
