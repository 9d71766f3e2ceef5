"""Plots of runs of many islands, whose names would not fit into a legend."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest

from diloco.records.run_folder import RunRecords, read_run, write_facts
from diloco.report.plots import (
    MAX_NAMED_ISLANDS,
    draw_bytes_of_many,
    draw_loss_line,
    draw_loss_of_many,
    find_absences,
    write_plots,
)
from diloco.report.style import new_axes
from tests.diloco.report.sample_run import INNER_STEPS, Island, a_runs_facts, write_baseline


def write_islands(run_dir: Path, num_islands: int) -> RunRecords:
    """A run of two rounds."""
    names = tuple(f"island-{index}" for index in range(num_islands))
    for name in names:
        island = Island(run_dir, name)
        for number in range(2):
            island.inner_steps()
            island.round(number, names)
    write_facts(run_dir, a_runs_facts(2))
    return read_run(run_dir)


@pytest.mark.parametrize("num_islands", [MAX_NAMED_ISLANDS, 64])
def test_the_plots_of_many_islands_leave_room_for_their_axes(
    num_islands: int, tmp_path: Path
) -> None:
    run = write_islands(tmp_path, num_islands)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # matplotlib warns when a legend leaves no room for the axes.
        write_plots(run, tmp_path)


def test_many_islands_that_have_made_no_step_are_drawn_beside_a_baseline_that_has(
    tmp_path: Path,
) -> None:
    write_islands(tmp_path, 64)
    for metrics in tmp_path.glob("island-*/metrics.jsonl"):
        metrics.write_text("")
    write_baseline(tmp_path)
    assert write_plots(read_run(tmp_path), tmp_path)["training-loss"] is None


def test_a_legend_sums_up_the_losses_of_many_islands(tmp_path: Path) -> None:
    run = write_islands(tmp_path, 64)
    _, axes = new_axes("", "", "")
    draw_loss_of_many(axes, run.islands)
    assert axes.get_legend_handles_labels()[1] == ["median of 64 islands  3.337"]
    assert len(axes.lines) == 65


def test_a_legend_gives_the_least_and_the_most_that_an_island_has_sent() -> None:
    _, axes = new_axes("", "", "")
    draw_bytes_of_many(axes, [[(1, 1000 * index)] for index in range(1, 21)])
    assert axes.get_legend_handles_labels()[1] == ["each of 20 islands  1 kB to 20 kB"]


def test_a_line_is_interrupted_where_its_island_was_away(tmp_path: Path) -> None:
    island = Island(tmp_path, "island-0")
    island.event("joined", "round 0, 0 tokens")
    island.inner_steps()
    island.event("died", "rank 0 was ended by SIGKILL")
    island.now += 60
    island.event("joined", "round 3, 512 tokens")
    island.inner_steps()
    run = read_run(tmp_path)
    _, axes = new_axes("", "", "")
    draw_loss_line(axes, run.islands[0], "black", "-", find_absences(run)["island-0"])
    (line,) = axes.lines
    steps = np.asarray(line.get_xdata(), dtype=float)
    assert [place for place, step in enumerate(steps) if math.isnan(step)] == [INNER_STEPS]
