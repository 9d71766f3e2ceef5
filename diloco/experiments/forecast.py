"""Forecast how long an experiment takes, from finished runs or else from a calibration. Does not
import torch.

A run of N islands in one process costs its start, N steps for each inner step, and its evaluations,
as calibrate.py measures them on one core. With gossip each island has its own params to evaluate.
Rounds are not calibrated. Once some rows have finished, the forecasts of the other rows are scaled
by the ratio of measured to calibrated time.
"""

import hashlib
import heapq
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from pydantic import TypeAdapter, ValidationError

from diloco.config.schema import Config, dump_config
from diloco.errors import ConfigError
from diloco.experiments.definition.rows import ISLAND_KEYS, Row, Run
from diloco.experiments.results.table import Results
from diloco.runtime.processes import start, stop
from inner.files import write_atomically

CALIBRATION_SECONDS = 1800.0
POLL_SECONDS = 0.05
TIMED_SHARE = 0.5
"""Least share of a run's steps that a process must have made for its time to count. In a shorter
piece, the start of the process is too large a part of the time."""
OF_A_RUN = ("name", "seed", "outer", "code_sha256")
"""Sections of the config that do not affect the cost of a step."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one core for an island's inner step, an evaluation, and the start of a run."""

    step: float
    evaluation: float
    start: float


_PARSER = TypeAdapter(dict[str, Cost])


@dataclass(frozen=True)
class Forecast:
    """Core-seconds of one whole run of each row, by the row's id."""

    core_seconds: Mapping[str, float]
    source: str
    """Source of the numbers, as text for the user."""


def kind_of(config: Config) -> str:
    """Return a key that is equal for configs whose inner steps cost the same."""
    island = config.for_island(0).model_dump(mode="json", include=set(ISLAND_KEYS))
    content = config.run.model_dump(mode="json", exclude=set(OF_A_RUN))
    for key in ("lr", "min_lr_ratio", "warmup_steps", "decay_steps", "schedule", "betas", "eps"):
        del content["optimizer"][key]
    del content["evaluate"]["every_rounds"]
    return hashlib.sha256(json.dumps([content, island], sort_keys=True).encode()).hexdigest()[:16]


def calibrate(rows: Iterable[Row], folder: Path) -> dict[str, Cost]:
    """Return the costs by kind of step. Measures those that FOLDER/calibration.json lacks. Raises
    ConfigError.
    """
    path = folder / "calibration.json"
    try:
        known = _PARSER.validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        known = {}
    missing = {kind: row.config for row in rows if (kind := kind_of(row.config)) not in known}
    if missing:
        known |= measure(missing, folder / "calibration")
        write_atomically(path, _PARSER.dump_json(known, indent=1).decode() + "\n")
    return known


def measure(configs: Mapping[str, Config], folder: Path) -> dict[str, Cost]:
    """Measure the costs in a child process. Raises ConfigError with the end of its output if it
    fails.
    """
    for kind, config in configs.items():
        write_atomically(folder / f"{kind}.yaml", dump_config(config))
    log = folder / "log.txt"
    child = start(
        "calibration", [sys.executable, "-m", "diloco.experiments.calibrate", str(folder)], log
    )
    deadline = time.monotonic() + CALIBRATION_SECONDS
    try:
        while child.exit_code is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:
        stop([child])
    if child.exit_code:
        raise ConfigError(f"calibration: the first steps of a run failed:\n{child.error_excerpt()}")
    costs = {kind: Cost(**json.loads((folder / f"{kind}.json").read_text())) for kind in configs}
    shutil.rmtree(folder, ignore_errors=True)
    return costs


def calibrated_seconds(row: Row, cost: Cost) -> float:
    """Return the core-seconds of one run of the row by the calibration."""
    config = row.config
    islands = len(row.config.islands)
    evaluations = 1 + config.outer.rounds // config.evaluate.every_rounds
    evaluations *= 1 if config.outer.gossip is None else islands
    return cost.start + islands * config.total_steps * cost.step + evaluations * cost.evaluation


def forecast(rows: Sequence[Row], results: Results, costs: Mapping[str, Cost]) -> Forecast:
    """Forecast the core-seconds of one run of each row."""
    calibrated = {row.row_id: calibrated_seconds(row, costs[kind_of(row.config)]) for row in rows}
    measured = {row.row_id: seconds for row in rows if (seconds := measured_seconds(row, results))}
    ratio = median([seconds / calibrated[row_id] for row_id, seconds in measured.items()] or [1.0])
    source = "from a calibration of a few steps on one core"
    if measured:
        source = f"of {len(measured)} rows from finished runs, of the other rows {source}"
        source += (
            f" times {ratio:.2f}, the ratio in finished runs" if len(measured) < len(rows) else ""
        )
    if len(measured) == len(rows):
        source = "from finished runs of each row"
    return Forecast(
        {row_id: measured.get(row_id, ratio * seconds) for row_id, seconds in calibrated.items()},
        source,
    )


def measured_seconds(row: Row, results: Results) -> float | None:
    """Return the core-seconds of a whole run from the row's finished runs.

    None if no run was timed over at least TIMED_SHARE of its length.
    """
    total = row.config.total_steps
    timed = [
        result
        for result in results.get(row.row_id, {}).values()
        if result.steps_timed > TIMED_SHARE * total
    ]
    return (
        fmean(total * result.core_seconds / result.steps_timed for result in timed)
        if timed
        else None
    )


def wall_seconds(runs: Sequence[Run], expected: Forecast, at_once: int) -> float:
    """Return the seconds until all runs are over if each run, in order, starts when one of
    `at_once` cores is free.
    """
    free_at = [0.0] * at_once
    for run in runs:
        heapq.heapreplace(free_at, free_at[0] + expected.core_seconds[run.row.row_id])
    return max(free_at)
