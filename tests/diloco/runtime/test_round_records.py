"""What is recorded of rounds, and when."""

import json
from pathlib import Path
from typing import Any

from diloco.records.metrics import Metrics
from diloco.runtime.progress import NO_PROGRESS, Progress
from diloco.runtime.round_records import RoundRecords
from outer.leases.ledger import Ledger
from outer.report import RoundReport, Waiting


def report_of(names: list[str], *, is_committed: bool, cause: str = "") -> RoundReport:
    return RoundReport(
        round=3,
        attempt=1,
        participants=names,
        is_committed=is_committed,
        digest="d",
        base="b",
        units=(),
        bytes_sent=1,
        bytes_received=2,
        reduce_seconds=0.5,
        wait_seconds=0.25,
        pseudo_grad_norm=1.0,
        gated={},
        cause=cause,
    )


def opened(folder: Path, start_islands: int = 3) -> RoundRecords:
    return RoundRecords(Metrics(folder / "metrics.jsonl"), start_islands)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_aborted_attempt_is_on_disk_as_soon_as_it_is_aborted(tmp_path: Path) -> None:
    records = opened(tmp_path)
    records.contribution = Progress(steps=4, tokens=2048)
    records.on_abort(report_of(["a", "b"], is_committed=False, cause="island 'b' is lost"))
    (line,) = lines(tmp_path)
    assert (line["kind"], line["round"], line["attempt"], line["committed"]) == (
        "round",
        3,
        1,
        False,
    )
    assert (line["participants"], line["cause"]) == (["a", "b"], "island 'b' is lost")
    assert (line["steps"], line["tokens"]) == (4, 2048)


def test_a_wait_is_recorded_when_whom_it_is_for_changes_and_else_rarely(tmp_path: Path) -> None:
    records = opened(tmp_path)
    for seconds in range(5, 30, 5):
        records.on_wait(Waiting(3, "gathering", float(seconds), {"b": "it is training"}))
    records.on_wait(Waiting(3, "gathering", 30.0, {"c": "it is lost"}))
    records.on_wait(None)
    assert [line["name"] for line in lines(tmp_path)] == ["waiting", "waiting"]
    assert (
        "b: it is training" in lines(tmp_path)[0]["text"]
        and "c: it is lost" in lines(tmp_path)[1]["text"]
    )


def test_islands_below_a_majority_are_told_that_their_rounds_may_be_thrown_away(
    tmp_path: Path,
) -> None:
    records = opened(tmp_path, start_islands=4)
    for names in (["a"], ["a", "b"], ["a", "b"], ["a", "b", "c"]):
        records.write(report_of(names, is_committed=True), NO_PROGRESS, 0.0, Ledger())
    events = [line for line in lines(tmp_path) if line["kind"] == "event"]
    assert [event["name"] for event in events] == ["alone", "minority"], (
        "the same few islands are told once"
    )
    assert all("no majority of the 4 islands" in event["text"] for event in events)


def test_an_island_that_began_alone_is_told_of_no_majority(tmp_path: Path) -> None:
    opened(tmp_path, start_islands=1).write(
        report_of(["a"], is_committed=True), NO_PROGRESS, 0.0, Ledger()
    )
    (event,) = (line for line in lines(tmp_path) if line["kind"] == "event")
    assert "majority" not in event["text"]


def test_a_loss_is_recorded_at_once_and_the_same_one_rarely(tmp_path: Path) -> None:
    records = opened(tmp_path)
    for island in ("b", "b", "c"):
        records.on_lost(island, "connection refused")
    assert [(line["name"], line["text"]) for line in lines(tmp_path)] == [
        ("lost", "b: connection refused"),
        ("lost", "c: connection refused"),
    ]


def test_the_progress_of_a_download_is_recorded(tmp_path: Path) -> None:
    opened(tmp_path).on_download("12 of 40 parts, 1.5 MB/s from a, b")
    assert [line["name"] for line in lines(tmp_path)] == ["downloading"]


def test_an_attempt_that_has_landed_has_the_times_of_the_ranks(tmp_path: Path) -> None:
    rows = [[0.0, 1.0, 0.0, 0.5, 0.0, 0.1], [1.0, 1.0, 0.0, 0.9, 0.0, 0.1]]
    opened(tmp_path).write(
        report_of(["a", "b"], is_committed=True), NO_PROGRESS, 0.0, Ledger(), rows
    )
    assert lines(tmp_path)[0]["ranks"] == rows
