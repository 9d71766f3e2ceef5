"""The islands of a run beside each other, from records that Metrics has written."""

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.records.metrics import Metrics
from diloco.records.run_folder import IslandRecords, read_run
from diloco.report.island_table import island_rows, short_rows
from tests.diloco.sample_records import a_round, a_step

START = 1_700_000_000.0
SECONDS = 10.0
"""Of a round, in which an island computes 6 or 9, waits for the others, and reduces in the last
one.
"""


def write_island(run_dir: Path, name: str, *, steps: int, step_seconds: float) -> None:
    """Two committed rounds and an aborted first attempt at the second, with 100 tokens per step."""
    metrics = Metrics(run_dir / name / "metrics.jsonl")
    for number, attempt in ((0, 0), (1, 0), (1, 1)):
        begin = START + (number + attempt) * SECONDS
        for step in range(1, steps + 1):
            took = {"seconds": step_seconds, "tokens_per_second": 100 / step_seconds}
            metrics.write(
                replace(a_step(step), tokens=100 * step, time=begin + step * step_seconds, **took)
            )
        waits = {"reduce_seconds": 1.0, "wait_seconds": SECONDS - 1 - steps * step_seconds}
        is_aborted = (number, attempt) == (1, 0)
        metrics.write(
            a_round(
                number,
                not is_aborted,
                attempt=attempt,
                tokens=100 * steps,
                time=begin + SECONDS,
                **waits,
            )
        )
    metrics.close()


@pytest.fixture
def islands(tmp_path: Path) -> list[IslandRecords]:
    """island-0 makes 9 steps per round and waits for nobody, island-1 makes 3 of twice the length
    and waits.
    """
    write_island(tmp_path, "island-0", steps=9, step_seconds=1.0)
    write_island(tmp_path, "island-1", steps=3, step_seconds=2.0)
    return read_run(tmp_path).islands


def test_an_island_contributes_its_tokens_of_committed_rounds(islands: list[IslandRecords]):
    assert [row["contributed"] for row in island_rows(islands)] == ["1.8k (75.0%)", "600 (25.0%)"]


def test_waits_of_aborted_attempts_count(islands: list[IslandRecords]):
    assert [(row["waited"], row["computing"]) for row in island_rows(islands)] == [
        ("0.0 s", "90%"),
        ("9.0 s", "60%"),
    ]


def test_nothing_is_contributed_before_the_first_commit(islands: list[IslandRecords]):
    alone = IslandRecords("island-0", steps=islands[0].steps)
    assert island_rows([alone])[0]["contributed"] == "-"


def test_a_name_that_a_peer_has_chosen_keeps_to_its_line():
    _, row = short_rows([IslandRecords("island\n\x1b[2J")])
    assert row[0] == "island  [2J"
