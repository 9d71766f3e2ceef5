"""The latest state of each island of a run, for `--json`, `--text` and Prometheus."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

from diloco.formatting import human_seconds
from diloco.overview.headline import OVER_SECONDS
from diloco.overview.overview import find_overview
from diloco.records.metrics import LOST
from diloco.watch.view.history import IslandHistory
from diloco.watch.view.run_view import RunView

FAILURES = ("hung", "failed", "died")
"""Ends that nobody asked for."""
SILENT_SECONDS = 15.0
SILENT_STEPS = 5
"""An island is called silent after the larger of a time without a record and a number of its usual
inner steps."""


def state_now(view: RunView) -> dict[str, Any]:
    """Return the run and the latest state of each island, as values for JSON."""
    now = time.time()
    last = max(
        (island.latest.figures.last_record or 0.0 for island in view.islands.values()), default=0.0
    )
    has_ended = any(island.latest.figures.end for island in view.islands.values())
    at = now if has_ended or now - last < OVER_SECONDS else last
    plan = view.plan
    overview = find_overview(view.account, plan, view.since)
    return {
        "name": plan.name,
        "total_steps": plan.num_steps,
        "num_rounds": plan.num_rounds,
        **asdict(view.figures),
        "headline": overview.headline.to_json(),
        "since": overview.since,
        "incidents": overview.lines,
        "incident_counts": dict(Counter(incident.kind for incident in view.account.incidents)),
        "islands": [describe_island(view, name, at) for name in view.islands],
        "loss_gap": measured_gap(view),
        "faults": len([fault for fault in view.faults if not fault[4]]),
    }


def measured_gap(view: RunView) -> float | None:
    """Return the last held-out loss relative to data-parallel training on as many tokens; None
    without a baseline.

    Between two evaluations of the baseline its loss is interpolated.
    """
    rows = [
        row
        for island in view.islands.values()
        for row in island.rows["evals"][-1:]
        if row[2] is not None
    ]
    known = [row for row in view.baseline.rows["evals"] if row[2] is not None]
    if not rows or not known:
        return None
    _, tokens, loss = max(rows, key=lambda row: row[1])
    for before, after in pairwise(known):
        if before[1] <= tokens <= after[1] and before[1] < after[1]:
            share = (tokens - before[1]) / (after[1] - before[1])
            return loss / (before[2] + share * (after[2] - before[2])) - 1
    return None


def describe_island(view: RunView, name: str, at: float) -> dict[str, Any]:
    """Return the latest state of one island as values for JSON. `at`: the unix time for which the
    state holds.
    """
    island = view.islands[name]
    pace = island.rows["pace"][-1][1:] if island.rows["pace"] else [None] * 4
    measured = dict(
        zip(("round_seconds", "utilisation", "round_bytes", "reduce_rate"), pace, strict=True)
    )
    state, is_wrong = find_state(view.islands, name, at)
    return {**asdict(island.latest.figures), **measured, "state": state, "is_wrong": is_wrong}


def find_state(islands: Mapping[str, IslandHistory], name: str, at: float) -> tuple[str, bool]:
    """Return in words what an island does, and whether that is a problem. The page's `stateOf` has
    the same rules.
    """
    island = islands[name]
    figures = island.latest.figures
    newest = figures.last_record
    rows = island.rows
    silence = rows["presence"][-1] if rows["presence"] and not rows["presence"][-1][1] else None
    if not newest:
        return ("not started", False) if silence is None else (f"no answer: {silence[2]}", True)
    ago = human_seconds(max(at - newest, 0.0))
    if figures.end:
        return f"{figures.end} {ago} ago", figures.end in FAILURES
    if silence is not None and silence[0] > newest:
        return f"no answer for {ago}: {silence[2]}", True
    if losers := find_losers(islands, name, newest):
        return f"silent for {ago}, lost to {', '.join(losers)}", True
    steps = [row[0] for row in rows["steps"][-20:]]
    usual = median(b - a for a, b in pairwise(steps)) if len(steps) > 1 else 10.0
    is_silent = at - newest > max(SILENT_SECONDS, SILENT_STEPS * usual)
    return (f"silent for {ago}", True) if is_silent else (f"last record {ago} ago", False)


def find_losers(islands: Mapping[str, IslandHistory], name: str, newest: float) -> list[str]:
    """Return the islands that have recorded, after the time `newest`, that they lost the island
    `name`.
    """
    return [
        other
        for other, island in islands.items()
        if other != name
        and any(
            row[1] == LOST and row[2].startswith(f"{name}: ") and row[0] > newest
            for row in island.rows["events"][-50:]
        )
    ]
