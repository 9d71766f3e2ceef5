"""The latest state of each island of a run, for `--json`, `--text` and Prometheus."""

import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from diloco.formatting import human_seconds
from diloco.records.metrics import LOST
from diloco.watch.view.facts import describe_run
from diloco.watch.view.history import IslandHistory
from diloco.watch.view.run_view import RunView

OVER_SECONDS = 600.0
"""A run without a record for this time is over: its state at its last record is shown."""
SILENT_SECONDS = 15.0
SILENT_STEPS = 5
"""An island is called silent after the larger of a time without a record and a number of its usual
inner steps."""


def state_now(view: RunView) -> dict[str, Any]:
    """Return the run and the latest state of each island, as values for JSON."""
    now = time.time()
    last = max((island.latest.time for island in view.islands.values()), default=0.0)
    at = now if now - last < OVER_SECONDS else last
    run = describe_run(view.run_dir)
    return {
        "name": run["name"],
        "total_steps": run["total_steps"],
        "islands": [describe_island(view, name, at) for name in view.islands],
        "loss_gap": measured_gap(view),
        "faults": len([fault for fault in view.faults if not fault[4]]),
    }


def measured_gap(view: RunView) -> float | None:
    """Return the last held-out loss relative to data-parallel training on as many tokens; None
    without a baseline.

    Between two evaluations of the baseline its loss is interpolated.
    """
    rows = [row for island in view.islands.values() for row in island.rows["evals"][-1:] if row[2] is not None]
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
    latest = island.latest
    rows = island.rows
    pace = rows["pace"][-1][1:] if rows["pace"] else [None] * 4
    state, is_wrong = find_state(view.islands, name, at)
    return {
        "name": name,
        "state": state,
        "is_wrong": is_wrong,
        "end": latest.end or None,
        "last_record": latest.time or None,
        "step": latest.step,
        "round": latest.round,
        "tokens": latest.tokens,
        "tokens_per_second": rows["steps"][-1][4] if rows["steps"] else None,
        "loss": next((row[3] for row in reversed(rows["steps"]) if row[3] is not None), None),
        "heldout_loss": rows["evals"][-1][2] if rows["evals"] else None,
        "committed": len(latest.committed),
        "aborted": latest.num_aborted,
        "bytes_sent": latest.bytes_sent,
        "digest": latest.digest,
        **dict(zip(("round_seconds", "utilisation", "round_bytes", "reduce_rate"), pace, strict=True)),
        "event": latest.event or None,
    }


def find_state(islands: Mapping[str, IslandHistory], name: str, at: float) -> tuple[str, bool]:
    """Return in words what an island does, and whether that is a problem. The page's `stateOf` has
    the same rules.
    """
    island = islands[name]
    newest = island.latest.time
    rows = island.rows
    silence = rows["presence"][-1] if rows["presence"] and not rows["presence"][-1][1] else None
    if not newest:
        return ("not started", False) if silence is None else (f"no answer: {silence[2]}", True)
    ago = human_seconds(max(at - newest, 0.0))
    if island.latest.end:
        return f"{island.latest.end} {ago} ago", island.latest.end in ("hung", "failed")
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
            row[1] == LOST and row[2].startswith(f"{name}: ") and row[0] > newest for row in island.rows["events"][-50:]
        )
    ]
