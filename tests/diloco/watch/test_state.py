"""What is said of islands, rounds and ranks in words, from folders that the real record classes
have written.
"""

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from diloco.records.metrics import LOST, EvalRecord, EventRecord, Metrics, Record
from diloco.watch.terminal import render
from diloco.watch.view.attempts import find_attempts, find_stragglers
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView
from diloco.watch.view.state import find_state, state_now
from tests.diloco.sample_records import a_round, a_step

NOW = time.time()


def event(name: str, text: str = "", ago: float = 0.0) -> EventRecord:
    return EventRecord(name=name, text=text, time=NOW - ago)


def view_of(run_dir: Path, *islands: list[Record]) -> RunView:
    for number, records in enumerate(islands):
        metrics = Metrics(run_dir / f"island-{number}/metrics.jsonl")
        for record in records:
            metrics.write(record)
        metrics.close()
    view = RunView(run_dir)
    view.read()
    return view


def note_presence(run_dir: Path, answers: bool, text: str = "", ago: float = 0.0) -> None:
    with (run_dir / "island-0/presence.jsonl").open("a") as file:
        file.write(json.dumps({"time": NOW - ago, "answers": answers, "text": text}) + "\n")


@pytest.mark.parametrize(
    ("own", "other", "state", "is_wrong"),
    [
        ([event("joined", ago=2)], [], "last record 2.0 s ago", False),
        (
            [event("left", ago=2)],
            [event(LOST, "island-0: refused", ago=1)],
            "left 2.0 s ago",
            False,
        ),
        ([event("hung", ago=2)], [], "hung 2.0 s ago", True),
        (
            [event("joined", ago=3)],
            [event(LOST, "island-0: refused", ago=1)],
            "lost to island-1",
            True,
        ),
        (
            [event("joined", ago=1)],
            [event(LOST, "island-0: refused", ago=3)],
            "last record 1.0 s ago",
            False,
        ),
        (
            [event("joined", ago=3)],
            [event(LOST, "island-00: refused", ago=1)],
            "last record 3.0 s ago",
            False,
        ),
        ([event("joined", ago=60)], [], "silent for 60.0 s", True),
        ([], [event("joined")], "not started", False),
    ],
)
def test_the_state_of_an_island_follows_from_its_records_and_those_of_others(
    tmp_path: Path, own: list[Record], other: list[Record], state: str, is_wrong: bool
) -> None:
    said, wrong = find_state(view_of(tmp_path, own, other).islands, "island-0", NOW)
    assert state in said and wrong is is_wrong


@pytest.mark.parametrize(
    ("presence", "state"),
    [
        ([(False, "refused", 1.0)], "no answer for 3.0 s: refused"),
        ([(False, "refused", 2.0), (True, "", 1.0)], "last record 3.0 s ago"),
        ([(False, "refused", 9.0)], "last record 3.0 s ago"),
    ],
)
def test_an_island_that_does_not_answer_is_lost_until_it_does(
    tmp_path: Path, presence: list, state: str
) -> None:
    view = view_of(tmp_path, [event("joined", ago=3)])
    for answers, text, ago in presence:
        note_presence(tmp_path, answers, text, ago)
    view.read()
    assert find_state(view.islands, "island-0", NOW)[0] == state


def test_damaged_lines_about_presence_are_passed_over(tmp_path: Path) -> None:
    view = view_of(tmp_path, [event("joined")])
    with (tmp_path / "island-0/presence.jsonl").open("a") as file:
        file.write('{}\n[]\n{"time": 1e400, "answers": 1, "text": ""}\n' + "[" * 5000 + "\n")
    view.read()
    assert view.islands["island-0"].rows["presence"] == []


def test_a_baseline_is_no_island(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "baseline/metrics.jsonl")
    view = view_of(tmp_path, [event("joined")])
    sent = view.read()
    metrics.write(EvalRecord(round=0, tokens=512, loss=2.5, bits_per_byte=None))
    metrics.close()
    now = view.read()
    assert list(view.islands) == ["island-0"]
    assert [row[1:] for row in view.between(sent, now)["baseline"]["evals"]] == [[512, 2.5]]
    assert view.snapshot(now)["baseline"]["evals"] == view.between(sent, now)["baseline"]["evals"]
    assert view.between(now, now)["baseline"] is None


def test_an_attempt_is_put_together_from_what_all_islands_recorded(tmp_path: Path) -> None:
    rows = {"mean_norm": 2.0, "signers": 2, "audited": 3}
    first = a_round(4, mean_cosine=0.5, wait_seconds=1.0, gated={"island-1": 7}, **rows)
    second = a_round(4, mean_cosine=0.75, wait_seconds=0.2, gated={"island-1": 5}, **rows)
    (attempt,) = find_attempts(view_of(tmp_path, [first], [second]), 9)
    notes = [
        "signed by 2",
        "3 parts audited",
        "12 parts of island-1 left out",
        "mean's norm 2",
        "cosines 0.50 to 0.75",
    ]
    assert attempt.notes == notes and attempt.last_to_come == "island-1 (0.8 s)"


@pytest.mark.parametrize(("computing", "named"), [(9.0, True), (6.1, False)])
def test_a_rank_is_named_only_if_the_others_waited_for_it(
    tmp_path: Path, computing: float, named: bool
) -> None:
    ranks = [[0.0, 10.0, 0.0, 6.0, 0.0, 1.0], [1.0, 10.0, 0.0, computing, 0.0, 1.0]]
    lines = list(find_stragglers(view_of(tmp_path, [a_round(0, ranks=ranks)]).islands))
    assert [line.startswith("island-0: the others waited 3.0 s for rank 1 ") for line in lines] == [
        True
    ] * named


def test_damaged_times_of_ranks_are_no_row(tmp_path: Path) -> None:
    assert not view_of(tmp_path, [a_round(0, ranks=[[0.0, 1.0]])]).islands["island-0"].rows["ranks"]


def test_the_terminal_shows_islands_rounds_and_what_happened(tmp_path: Path) -> None:
    other = [a_step(3), a_round(2, committed=False), event(LOST, "island-0: refused")]
    view = view_of(tmp_path, [a_step(3), a_round(2, committed=False)], other)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(RunPrediction(view)))
    text = console.export_text()
    happened = ("round 2 attempt 0: aborted on 2", "island-1 lost: island-0: refused")
    for shown in ("island-0", "no prediction: cannot read the config", *happened):
        assert shown in text
    assert [island["name"] for island in state_now(view)["islands"]] == ["island-0", "island-1"]
