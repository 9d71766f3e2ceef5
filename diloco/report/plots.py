"""The report's pictures. Each draw_* writes a PNG, or returns a note that says why there is nothing to draw."""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from diloco.canvas import ISLAND_COLORS, REFERENCE, WRONG, new_axes, save, styled
from diloco.metrics import EvalRecord, StepRecord
from diloco.runfiles import IslandRecords, RunRecords
from diloco.summary import data_parallel_bytes_per_step
from diloco.timeline import draw_timeline
from diloco.units import human_bytes, human_count

MAX_POINTS = 2000


@dataclass(frozen=True)
class Plot:
    """One picture of the report."""

    stem: str
    title: str
    caption: str
    draw: Callable[[RunRecords, Path], str | None]


def write_plots(run: RunRecords, folder: Path) -> dict[str, str | None]:
    """Draw every plot into `folder` as <stem>.png; by stem, the note of what could not be drawn, or None."""
    with styled():
        return {plot.stem: plot.draw(run, folder / f"{plot.stem}.png") for plot in PLOTS}


def draw_heldout(run: RunRecords, path: Path) -> str | None:
    """Held-out loss against tokens, with the baseline and the byte bigram model."""
    ours = eval_curve([e for island in run.islands for e in island.evals])
    theirs = eval_curve(run.baseline.evals) if run.baseline else []
    if not ours and not theirs:
        return "No held-out loss has been recorded yet."
    figure, axes = new_axes("Held-out loss", "tokens, all islands together", "loss, nats a token")
    if theirs:
        line = {"color": REFERENCE, "linestyle": (0, (4, 2)), "marker": "s", "markersize": 4, "linewidth": 1.8}
        axes.plot(*zip(*theirs, strict=True), label=f"data-parallel baseline  {theirs[-1][1]:.3f}", **line)
    if ours:
        line = {"color": ISLAND_COLORS[0], "marker": "o", "markersize": 4.5, "linewidth": 2.4}
        islands = "island" if run.num_islands == 1 else "islands"
        axes.plot(*zip(*ours, strict=True), label=f"{run.num_islands} {islands}  {ours[-1][1]:.3f}", **line)
    if run.facts and run.facts.bigram_loss is not None:
        bigram = run.facts.bigram_loss
        axes.axhline(bigram, color=WRONG, linestyle=":", linewidth=1.8, label=f"byte bigram model  {bigram:.3f}")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
    axes.set_xlim(left=0)
    axes.legend()
    return save(figure, path)


def draw_training_loss(run: RunRecords, path: Path) -> str | None:
    """Each island's training loss against its inner steps, smoothed over the raw."""
    series = [*run.islands, *([run.baseline] if run.baseline else [])]
    if not any(loss_points(island.steps) for island in series):
        return "No inner step with a loss has been recorded yet."
    figure, axes = new_axes("Training loss of each island", "inner step", "loss, nats a token")
    for index, island in enumerate(series):
        is_baseline = island is run.baseline
        color = REFERENCE if is_baseline else ISLAND_COLORS[index % len(ISLAND_COLORS)]
        draw_loss_line(axes, island, color, "--" if is_baseline or index >= len(ISLAND_COLORS) else "-")
    axes.legend()
    return save(figure, path)


def draw_loss_line(axes: Axes, island: IslandRecords, color: str, linestyle: str) -> None:
    """One island's raw and smoothed loss, and a cross where a step was skipped."""
    points = loss_points(island.steps)
    if not points:
        return
    steps, losses = zip(*points, strict=True)
    smooth = moving_average(losses, len(losses) // 80)
    if len(points) >= 40:
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    marker = "o" if len(points) < 40 else None
    line = {"color": color, "linestyle": linestyle, "linewidth": 1.8, "marker": marker, "markersize": 3}
    axes.plot(steps, smooth, label=f"{island.name}  {smooth[-1]:.3f}", **line)
    skipped = [record.step for record in island.steps if record.skipped]
    if skipped:
        heights = [smooth[min(bisect.bisect(steps, step), len(smooth) - 1)] for step in skipped]
        cross = {"color": WRONG, "marker": "x", "s": 60, "linewidths": 2.2, "zorder": 5}
        axes.scatter(skipped, heights, label=f"{island.name}: {len(skipped)} skipped", **cross)


def draw_bytes(run: RunRecords, path: Path) -> str | None:
    """Bytes each island has sent against what data-parallel training would have sent, on a log scale."""
    curves = [(island, bytes_curve(island)) for island in run.islands]
    curves = [(island, curve) for island, curve in curves if curve]
    if not curves:
        return "Nothing has been sent between islands yet."
    figure, axes = new_axes("Bytes sent by each island, so far", "inner step", "bytes sent, log scale")
    for index, (island, curve) in enumerate(curves):
        # Islands often send the same: the later ones are drawn thinner, so that all of them show.
        width = max(4.5 - 1.5 * index, 1.2)
        label = f"{island.name}  {human_bytes(curve[-1][1])}"
        marker = "o" if len(curve) <= 30 else None
        line = {"color": ISLAND_COLORS[index % len(ISLAND_COLORS)], "linewidth": width, "marker": marker}
        axes.plot(*zip(*curve, strict=True), drawstyle="steps-post", markersize=width + 1, label=label, **line)
    if run.facts and run.num_islands > 1:
        draw_data_parallel_bytes(axes, run, max((curve[-1] for _, curve in curves), key=lambda point: point[1]))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Powers of ten alone would leave a short axis with one label or none.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    return save(figure, path)


def draw_data_parallel_bytes(axes: Axes, run: RunRecords, last: tuple[int, int]) -> None:
    """The line of data-parallel training, and how many times above `last` (step, bytes) it ends."""
    assert run.facts is not None, "the caller has looked"
    step, sent = last
    per_step = data_parallel_bytes_per_step(run.facts.num_params, run.num_islands)
    steps = range(1, step + 1, max(1, step // MAX_POINTS))
    label = f"data-parallel would have sent  {human_bytes(per_step * step)}"
    heights = [per_step * number for number in steps]
    axes.plot(list(steps), heights, color=REFERENCE, linestyle="--", linewidth=2, label=label)
    arrow = {"arrowstyle": "<->", "color": REFERENCE, "linewidth": 1.2, "shrinkA": 3, "shrinkB": 3}
    axes.annotate("", xy=(step, sent), xytext=(step, per_step * step), arrowprops=arrow)
    text = f"{per_step * step / sent:.1f}x" if per_step * step < 100 * sent else f"{per_step * step / sent:.0f}x"
    middle = (step, math.sqrt(sent * per_step * step))
    offset = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontweight": "bold"}
    axes.annotate(text, xy=middle, annotation_clip=False, **offset)


def eval_curve(evals: Sequence[EvalRecord]) -> list[tuple[int, float]]:
    """(tokens, loss), one point a round, although every island may have recorded it."""
    by_round = {e.round: (e.tokens, e.loss) for e in evals if e.loss is not None}
    return sorted(by_round.values())


def loss_points(steps: Sequence[StepRecord]) -> list[tuple[int, float]]:
    """(step, loss) of the steps that were not skipped, thinned to what a picture can show."""
    points = [(s.step, s.loss) for s in steps if s.loss is not None and not s.skipped]
    return points[:: math.ceil(len(points) / MAX_POINTS) or 1]


def bytes_curve(island: IslandRecords) -> list[tuple[int, int]]:
    """(inner step, bytes sent so far) after each attempt at a round; empty when nothing was sent."""
    times = [step.time for step in island.steps]
    made = [bisect.bisect(times, record.time) for record in island.rounds]
    sent = accumulate(record.bytes_sent for record in island.rounds)
    at_step = [island.steps[count - 1].step if count else 0 for count in made]
    return [(step, total) for step, total in zip(at_step, sent, strict=True) if total > 0]


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """At each place the mean of the values up to `reach` places to either side; of fewer at the ends."""
    sums = [0.0, *accumulate(values)]
    bounds = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in bounds]


PLOTS = (
    Plot(
        "heldout",
        "Held-out loss",
        "Measured on the global params after a round, on text that is never trained on.",
        draw_heldout,
    ),
    Plot(
        "training-loss",
        "Training loss",
        "Of each island on its own data: raw (faint), and averaged over the fortieth of its steps around.",
        draw_training_loss,
    ),
    Plot(
        "bytes",
        "Bytes sent",
        "As they left the process, payload and protocol; aborted attempts count. "
        "Data-parallel: computed, an fp32 ring all-reduce of the gradients at every inner step.",
        draw_bytes,
    ),
    Plot(
        "timeline",
        "Timeline",
        "White is everything else: evaluation, applying the outer step, start-up.",
        draw_timeline,
    ),
)
