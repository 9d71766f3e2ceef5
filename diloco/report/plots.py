"""The plots of the report. Each draw_* function writes a PNG, or returns a note that says why there
is no data.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from diloco.formatting import human_bytes, human_count
from diloco.overview.overview import account_of
from diloco.overview.traffic import data_parallel_bytes_per_step
from diloco.records.metrics import EvalRecord, RoundRecord, StepRecord
from diloco.records.run_folder import IslandRecords, RunRecords
from diloco.report.style import ISLAND_COLORS, REFERENCE, WRONG, new_axes, plot_style, save
from diloco.report.timeline import draw_timeline

MAX_POINTS = 2000
MAX_NAMED_ISLANDS = 12
"""Most islands that a legend names. With more, their lines look alike."""
FAINT_LINE = {"color": ISLAND_COLORS[0], "linewidth": 0.8, "alpha": 0.3}


@dataclass(frozen=True)
class Plot:
    """One plot of the report. `draw` writes it to a path and returns None, or returns a note
    instead.
    """

    stem: str
    title: str
    caption: str
    draw: Callable[[RunRecords, Path], str | None]


def write_plots(run: RunRecords, folder: Path) -> dict[str, str | None]:
    """Draw every plot into `folder` as <stem>.png.

    Return, by stem, the note of a plot without data, and None for the others.
    """
    with plot_style():
        return {plot.stem: plot.draw(run, folder / f"{plot.stem}.png") for plot in PLOTS}


def draw_heldout(run: RunRecords, path: Path) -> str | None:
    """Draw held-out loss against tokens, with the baseline and the byte bigram model."""
    ours = eval_curve([e for island in run.islands for e in island.evals])
    theirs = eval_curve(run.baseline.evals) if run.baseline else []
    if not ours and not theirs:
        return "No held-out loss has been recorded yet."
    figure, axes = new_axes("Held-out loss", "tokens, all islands together", "loss, nats per token")
    if theirs:
        line = {
            "color": REFERENCE,
            "linestyle": (0, (4, 2)),
            "marker": "s",
            "markersize": 4,
            "linewidth": 1.8,
        }
        axes.plot(
            *zip(*theirs, strict=True), label=f"data-parallel baseline  {theirs[-1][1]:.3f}", **line
        )
    if ours:
        line = {"color": ISLAND_COLORS[0], "marker": "o", "markersize": 4.5, "linewidth": 2.4}
        islands = "island" if run.num_islands == 1 else "islands"
        axes.plot(
            *zip(*ours, strict=True),
            label=f"{run.num_islands} {islands}  {ours[-1][1]:.3f}",
            **line,
        )
    if run.facts and run.facts.bigram_loss is not None:
        bigram = run.facts.bigram_loss
        axes.axhline(
            bigram,
            color=WRONG,
            linestyle=":",
            linewidth=1.8,
            label=f"byte bigram model  {bigram:.3f}",
        )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
    axes.set_xlim(left=0)
    axes.legend()
    return save(figure, path)


def draw_training_loss(run: RunRecords, path: Path) -> str | None:
    """Draw each island's training loss against its inner steps, both raw and smoothed."""
    baseline = [run.baseline] if run.baseline else []
    series = [*run.islands, *baseline]
    absences = find_absences(run)
    if not any(loss_points(island.steps) for island in series):
        return "No inner step with a loss has been recorded yet."
    figure, axes = new_axes("Training loss of each island", "inner step", "loss, nats per token")
    if len(run.islands) > MAX_NAMED_ISLANDS:
        draw_loss_of_many(axes, run.islands)
        series = baseline
    for index, island in enumerate(series):
        is_baseline = island is run.baseline
        color = REFERENCE if is_baseline else ISLAND_COLORS[index % len(ISLAND_COLORS)]
        style = "--" if is_baseline or index >= len(ISLAND_COLORS) else "-"
        draw_loss_line(axes, island, color, style, absences.get(island.name, ()))
    axes.legend()
    return save(figure, path)


def draw_loss_of_many(axes: Axes, islands: Sequence[IslandRecords]) -> None:
    """Draw the loss of each island as a faint line, and the median of all as a strong one."""
    losses: dict[int, list[float]] = {}
    for island in islands:
        points = loss_points(island.steps)
        smooth = moving_average([loss for _, loss in points], len(points) // 80)
        axes.plot([step for step, _ in points], smooth, **FAINT_LINE)
        for step, loss in points:
            losses.setdefault(step, []).append(loss)
    if not losses:
        return
    steps = sorted(losses)
    medians = moving_average([median(losses[step]) for step in steps], len(steps) // 80)
    label = f"median of {len(islands)} islands  {medians[-1]:.3f}"
    axes.plot(steps, medians, color=ISLAND_COLORS[0], linewidth=2.4, label=label)


def draw_loss_line(
    axes: Axes, island: IslandRecords, color: str, linestyle: str, absences: Sequence[float] = ()
) -> None:
    """Draw one island's raw and smoothed loss, with a cross at each skipped step.

    The lines end where an absence begins, and go on after it. `absences`: their unix times.
    """
    points = loss_points(island.steps)
    if not points:
        return
    steps, losses = zip(*points, strict=True)
    smooth = moving_average(losses, len(losses) // 80)
    gaps = find_gaps([step.time for step in loss_steps(island.steps)], absences)
    if len(points) >= 40:
        axes.plot(
            with_gaps(steps, gaps), with_gaps(losses, gaps), color=color, alpha=0.25, linewidth=0.8
        )
    marker = "o" if len(points) < 40 else None
    line = {
        "color": color,
        "linestyle": linestyle,
        "linewidth": 1.8,
        "marker": marker,
        "markersize": 3,
    }
    label = f"{island.name}  {smooth[-1]:.3f}"
    axes.plot(with_gaps(steps, gaps), with_gaps(smooth, gaps), label=label, **line)
    skipped = [record.step for record in island.steps if record.skipped]
    if skipped:
        heights = [smooth[min(bisect.bisect(steps, step), len(smooth) - 1)] for step in skipped]
        cross = {"color": WRONG, "marker": "x", "s": 60, "linewidths": 2.2, "zorder": 5}
        axes.scatter(skipped, heights, label=f"{island.name}: {len(skipped)} skipped", **cross)


def draw_bytes(run: RunRecords, path: Path) -> str | None:
    """Draw the bytes that each island has sent and those of data-parallel training, on a log
    scale.
    """
    curves = [(island, bytes_curve(island)) for island in run.islands]
    curves = [(island, curve) for island, curve in curves if curve]
    if not curves:
        return "Nothing has been sent between islands yet."
    figure, axes = new_axes(
        "Bytes sent by each island, so far", "inner step", "bytes sent, log scale"
    )
    if len(curves) > MAX_NAMED_ISLANDS:
        draw_bytes_of_many(axes, [curve for _, curve in curves])
    else:
        draw_bytes_by_island(axes, curves, find_absences(run))
    if run.facts and run.num_islands > 1:
        draw_data_parallel_bytes(
            axes, run, max((curve[-1] for _, curve in curves), key=lambda point: point[1])
        )
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # On a short axis, powers of ten alone would give at most one label.
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=12)
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    return save(figure, path)


def draw_bytes_by_island(
    axes: Axes,
    curves: Sequence[tuple[IslandRecords, list[tuple[int, int]]]],
    absences: Mapping[str, Sequence[float]],
) -> None:
    """Draw a line with a name for each island, with a gap at each absence."""
    for index, (island, curve) in enumerate(curves):
        # Islands often send the same amount, so later lines are thinner to keep all of them
        # visible.
        width = max(4.5 - 1.5 * index, 1.2)
        label = f"{island.name}  {human_bytes(curve[-1][1])}"
        marker = "o" if len(curve) <= 30 else None
        line = {
            "color": ISLAND_COLORS[index % len(ISLAND_COLORS)],
            "linewidth": width,
            "marker": marker,
        }
        gaps = find_gaps(
            [record.time for record in sending_rounds(island)], absences.get(island.name, ())
        )
        steps, sent = (with_gaps(values, gaps) for values in zip(*curve, strict=True))
        axes.plot(steps, sent, drawstyle="steps-post", markersize=width + 1, label=label, **line)


def draw_bytes_of_many(axes: Axes, curves: Sequence[list[tuple[int, int]]]) -> None:
    """Draw a faint line for each island, and one label with the least and the most that an island
    has sent.
    """
    sent = [curve[-1][1] for curve in curves]
    label = f"each of {len(curves)} islands  {human_bytes(min(sent))} to {human_bytes(max(sent))}"
    axes.plot([], [], color=FAINT_LINE["color"], linewidth=2.4, label=label)
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), drawstyle="steps-post", **FAINT_LINE)


def draw_data_parallel_bytes(axes: Axes, run: RunRecords, last: tuple[int, int]) -> None:
    """Draw the line of data-parallel training and annotate its ratio to `last` (step, bytes)."""
    assert run.facts is not None, "the caller checks that the run has facts"
    step, sent = last
    per_step = data_parallel_bytes_per_step(run.facts.num_params, run.num_islands)
    steps = range(1, step + 1, max(1, step // MAX_POINTS))
    label = f"data-parallel in bf16 would have sent  {human_bytes(per_step * step)}"
    heights = [per_step * number for number in steps]
    axes.plot(list(steps), heights, color=REFERENCE, linestyle="--", linewidth=2, label=label)
    arrow = {"arrowstyle": "<->", "color": REFERENCE, "linewidth": 1.2, "shrinkA": 3, "shrinkB": 3}
    axes.annotate("", xy=(step, sent), xytext=(step, per_step * step), arrowprops=arrow)
    text = (
        f"{per_step * step / sent:.1f}x"
        if per_step * step < 100 * sent
        else f"{per_step * step / sent:.0f}x"
    )
    middle = (step, math.sqrt(sent * per_step * step))
    offset = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontweight": "bold"}
    axes.annotate(text, xy=middle, annotation_clip=False, **offset)


def eval_curve(evals: Sequence[EvalRecord]) -> list[tuple[int, float]]:
    """Return (tokens, loss), one point per round, even if several islands have recorded the
    round.
    """
    by_round = {e.round: (e.tokens, e.loss) for e in evals if e.loss is not None}
    return sorted(by_round.values())


def loss_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps with a loss that were not skipped, thinned to at most MAX_POINTS."""
    made = [step for step in steps if step.loss is not None and not step.skipped]
    return made[:: math.ceil(len(made) / MAX_POINTS) or 1]


def loss_points(steps: Sequence[StepRecord]) -> list[tuple[int, float]]:
    """Return (step, loss) of `loss_steps`."""
    return [(step.step, step.loss) for step in loss_steps(steps) if step.loss is not None]


def find_absences(run: RunRecords) -> dict[str, list[float]]:
    """Return by island the unix times at which it went away."""
    return {
        name: [each.begin for each in island.absences]
        for name, island in account_of(run).islands.items()
    }


def find_gaps(times: Sequence[float], absences: Sequence[float]) -> set[int]:
    """Return the positions of the points before which a line is interrupted.

    `times`: of its points, in order.
    """
    return {bisect.bisect(times, begin) for begin in absences} - {0, len(times)}


def with_gaps(values: Sequence[float], gaps: set[int]) -> list[float]:
    """Return the values with a NaN, which is not drawn, before those at the positions `gaps`."""
    parts = [[math.nan, value] if place in gaps else [value] for place, value in enumerate(values)]
    return [value for part in parts for value in part]


def sending_rounds(island: IslandRecords) -> list[RoundRecord]:
    """Return the attempts after the first one in which the island sent anything."""
    first = next(
        (place for place, record in enumerate(island.rounds) if record.bytes_sent),
        len(island.rounds),
    )
    return island.rounds[first:]


def bytes_curve(island: IslandRecords) -> list[tuple[int, int]]:
    """Return (inner step, total bytes sent) after each attempt at a round.

    Empty if nothing was sent.
    """
    times = [step.time for step in island.steps]
    steps_made = [bisect.bisect(times, record.time) for record in island.rounds]
    sent = accumulate(record.bytes_sent for record in island.rounds)
    at_step = [island.steps[count - 1].step if count else 0 for count in steps_made]
    return [(step, total) for step, total in zip(at_step, sent, strict=True) if total > 0]


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of the values within `reach` positions on either side, fewer at the ends."""
    sums = [0.0, *accumulate(values)]
    bounds = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in bounds]


PLOTS = (
    Plot(
        "heldout",
        "Held-out loss",
        "Loss of the global params after a round, on text that is never trained on.",
        draw_heldout,
    ),
    Plot(
        "training-loss",
        "Training loss",
        "Loss of each island on its own data: raw (faint), and as a moving average over a fortieth "
        "of its steps.",
        draw_training_loss,
    ),
    Plot(
        "bytes",
        "Bytes sent",
        "Bytes that each island's process has sent, payload and protocol, including aborted "
        "attempts. "
        "Data-parallel is computed: a bf16 ring all-reduce of the gradients at every inner step.",
        draw_bytes,
    ),
    Plot(
        "timeline",
        "Timeline",
        "White is other time: start-up, applying the outer step. A dashed frame is an absence.",
        draw_timeline,
    ),
)
