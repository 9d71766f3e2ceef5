"""The timeline plot: when each island was training, waiting and averaging."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from diloco.overview.account import IslandAccount
from diloco.overview.overview import account_of
from diloco.records.metrics import RoundRecord, StepRecord
from diloco.records.run_folder import IslandRecords, RunRecords
from diloco.report.island_table import computing_share
from diloco.report.style import INK, REFERENCE, WRONG, new_axes, save

Activity = Literal["inner steps", "wait", "reduce", "evaluating", "saving", "aborted"]
ACTIVITY_COLORS: dict[Activity, str] = {
    "inner steps": "#56B4E9",
    "wait": "#C9CCD3",
    "reduce": "#E69F00",
    "evaluating": "#009E73",
    "saving": "#CC79A7",
    "aborted": WRONG,
}
MAX_ROUND_LABELS = 24
LEGEND_COLUMNS = 4
LABEL_SHARE = 0.07
"""Least distance of two events whose names are both written, as a share of the time axis."""


@dataclass(frozen=True)
class Segment:
    """One activity from `start` to `end`, in unix seconds."""

    activity: Activity
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


def find_segments(island: IslandRecords) -> list[Segment]:
    """Return all activities of an island, inner steps first."""
    evaluations = [
        Segment("evaluating", each.time - each.seconds, each.time)
        for each in island.evals
        if each.seconds
    ]
    saves = [Segment("saving", each.time - each.seconds, each.time) for each in island.pauses]
    return (
        merge_steps(island.steps)
        + evaluations
        + saves
        + [part for record in island.rounds for part in round_segments(record)]
    )


def merge_steps(steps: list[StepRecord]) -> list[Segment]:
    """Merge inner steps that follow one another without a pause.

    steps of 1 s ending at 1 2 3 7 8  ->  0..3 6..8
    """
    if not steps:
        return []
    pause = statistics.median(step.seconds for step in steps) / 2
    merged: list[Segment] = []
    for step in steps:
        start = step.time - step.seconds
        end = step.time
        if merged and start - merged[-1].end <= pause:
            merged[-1] = Segment("inner steps", merged[-1].start, max(end, merged[-1].end))
        else:
            merged.append(Segment("inner steps", start, end))
    return merged


def round_segments(record: RoundRecord) -> list[Segment]:
    """Return the segments of one attempt: the wait, then the reduce.

    An aborted attempt is a single segment.
    """
    reduce_start = record.time - record.reduce_seconds
    wait_start = reduce_start - record.wait_seconds
    if not record.committed:
        return [Segment("aborted", wait_start, record.time)]
    return [Segment("wait", wait_start, reduce_start), Segment("reduce", reduce_start, record.time)]


def draw_timeline(run: RunRecords, path: Path) -> str | None:
    """Draw one lane per island with its inner steps, waits, reduces and aborted attempts, and a
    tick at each commit.
    """
    spans = [span for island in run.islands for span in island.spans]
    if not spans:
        return "No island has recorded anything yet."
    origin = min(start for start, _ in spans)
    last = max(end for _, end in spans)
    unit, unit_seconds = time_unit(last - origin)
    figure, axes = new_axes(
        "What each island did",
        f"{unit} since the first inner step began",
        "",
        height=figure_height(run),
    )
    account = account_of(run)
    for lane, island in enumerate(run.islands):
        draw_lane(axes, island, lane, lambda seconds: (seconds - origin) / unit_seconds)
        label_events(
            axes, island, lane, lambda seconds: (seconds - origin) / unit_seconds, last - origin
        )
        share = computing_share(island)
        if share is not None:
            right = {
                "xytext": (6, 0),
                "textcoords": "offset points",
                "va": "center",
                "fontsize": 10,
            }
            text = f"{share * 100:.0f} % computing"
            axes.annotate(
                text, xy=((last - origin) / unit_seconds, lane), annotation_clip=False, **right
            )
        mark_absences(
            axes,
            account.islands[island.name],
            lane,
            lambda seconds: (seconds - origin) / unit_seconds,
            last,
        )
    label_commits(axes, run, lambda seconds: (seconds - origin) / unit_seconds)
    mark_faults(axes, run, lambda seconds: (seconds - origin) / unit_seconds)
    axes.set_yticks(range(len(run.islands)), [island.name for island in run.islands])
    axes.set_ylim(len(run.islands) - 0.4, -0.75)
    axes.set_xlim(0, max((last - origin) / unit_seconds, 1e-9))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = activity_legend(has_faults=bool(run.faults))
    figure.legend(handles=handles, loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=10)
    return save(figure, path)


def draw_lane(axes: Axes, island: IslandRecords, lane: int, at: Callable[[float], float]) -> None:
    """Draw one island's bars. `at` converts unix seconds to axis coordinates."""
    segments = find_segments(island)
    for activity, color in ACTIVITY_COLORS.items():
        bars = [(at(s.start), at(s.end) - at(s.start)) for s in segments if s.activity == activity]
        # The edge keeps bars visible that are narrower than a pixel.
        look = {"facecolor": color, "edgecolor": color, "linewidth": 0.7}
        if activity == "aborted":
            look |= {"hatch": "////", "edgecolor": "white", "zorder": 3}
            axes.broken_barh(
                bars, (lane - 0.3, 0.6), facecolor=color, edgecolor=color, linewidth=1.0, zorder=3
            )
        axes.broken_barh(bars, (lane - 0.3, 0.6), **look)


def label_events(
    axes: Axes, island: IslandRecords, lane: int, at: Callable[[float], float], span_seconds: float
) -> None:
    """Mark each event of an island below its lane, with its name where it has room."""
    labelled = -math.inf
    for event in island.events:
        # The event `account` is recorded as the island leaves: its label would cover the label of
        # `left`.
        if event.name == "account":
            continue
        axes.plot(
            [at(event.time)],
            [lane + 0.36],
            marker="^",
            color=INK,
            markersize=5,
            clip_on=False,
            zorder=4,
        )
        if event.time - labelled < LABEL_SHARE * span_seconds:
            continue
        labelled = event.time
        below = {"xytext": (4, -2), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
        axes.annotate(event.name[:24], xy=(at(event.time), lane + 0.38), **below)


def mark_absences(
    axes: Axes, island: IslandAccount, lane: int, at: Callable[[float], float], last: float
) -> None:
    """Draw a dashed frame for each time in which an island had no processes, and a thick line where
    it ended.
    """
    for absence in island.absences:
        end = last if absence.end is None else absence.end
        if end <= absence.begin:
            continue
        color = WRONG if absence.is_failure else REFERENCE
        look = {"facecolor": "none", "edgecolor": color, "linestyle": (0, (3, 3)), "linewidth": 0.8}
        axes.broken_barh(
            [(at(absence.begin), at(end) - at(absence.begin))], (lane - 0.3, 0.6), **look
        )
        axes.vlines(
            [at(absence.begin)], lane - 0.36, lane + 0.36, color=color, linewidth=2.5, zorder=5
        )


def label_commits(axes: Axes, run: RunRecords, at: Callable[[float], float]) -> None:
    """Draw a tick above the lane of each island that committed, and the round's number above all
    lanes.
    """
    last_commit: dict[int, float] = {}
    for lane, island in enumerate(run.islands):
        times = [record.time for record in island.rounds if record.committed]
        axes.vlines(
            [at(time) for time in times],
            lane - 0.44,
            lane - 0.32,
            color=INK,
            linewidth=1.3,
            zorder=4,
        )
        for record in island.rounds:
            if record.committed:
                last_commit[record.round] = max(
                    record.time, last_commit.get(record.round, record.time)
                )
    stride = math.ceil(len(last_commit) / MAX_ROUND_LABELS) or 1
    for number in sorted(last_commit)[::stride]:
        place = (at(last_commit[number]), -0.5)
        axes.text(*place, str(number), ha="center", va="bottom", fontsize=8.5, color=REFERENCE)


def mark_faults(axes: Axes, run: RunRecords, at: Callable[[float], float]) -> None:
    """Draw a cross with the fault's kind in the lane of each affected island, or above all lanes if
    there is none.
    """
    lanes_of = {island.name: lane for lane, island in enumerate(run.islands)}
    for fault in run.faults:
        affected = [lanes_of[name] for name in fault.islands if name in lanes_of] or [-0.55]
        for lane in [] if fault.is_end else affected:
            look = {
                "marker": "X",
                "color": WRONG,
                "markeredgecolor": "white",
                "markersize": 9,
                "zorder": 6,
            }
            axes.plot([at(fault.time)], [lane], **look)
            below = {
                "xytext": (0, -6),
                "textcoords": "offset points",
                "ha": "center",
                "va": "top",
                "fontsize": 8.5,
            }
            axes.annotate(fault.kind, xy=(at(fault.time), lane), color=WRONG, zorder=6, **below)


def activity_legend(*, has_faults: bool) -> list[Patch | Line2D]:
    """Return the legend entries of the timeline."""
    handles: list[Patch | Line2D] = [
        Patch(color=color, label=activity) for activity, color in ACTIVITY_COLORS.items()
    ]
    handles[-1] = Patch(facecolor=WRONG, edgecolor="white", hatch="////", label="aborted attempt")
    tick = {
        "color": INK,
        "marker": "|",
        "linestyle": "none",
        "markersize": 9,
        "markeredgewidth": 1.5,
    }
    cross = {
        "color": WRONG,
        "marker": "X",
        "linestyle": "none",
        "markeredgecolor": "white",
        "markersize": 9,
    }
    handles.append(Line2D([], [], label="commit, its round above", **tick))
    return [*handles, Line2D([], [], label="fault inflicted", **cross)] if has_faults else handles


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the name of the time axis's unit and its length in seconds."""
    return (
        ("seconds", 1.0)
        if seconds < 600
        else ("minutes", 60.0)
        if seconds < 3 * 3600
        else ("hours", 3600.0)
    )


def figure_height(run: RunRecords) -> float:
    """Return the height of the timeline in inches."""
    return 2.15 + 0.62 * min(len(run.islands), 40)
