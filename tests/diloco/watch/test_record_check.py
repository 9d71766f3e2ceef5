"""What of a peer's records is believed."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.records.metrics import EvalRecord, EventRecord, to_line
from diloco.status.record_pages import PAGE_BYTES, RecordsPage
from diloco.watch.collection.mirror import RecordsMirror
from diloco.watch.collection.record_check import FUTURE_SECONDS, PAST_SECONDS, check_record
from diloco.watch.view.run_view import RunView
from tests.diloco.sample_records import a_round, a_step

NOW = 1_800_000_000.0


def line(record: Any, **changes: Any) -> str:
    return json.dumps(json.loads(to_line(record)) | {"time": NOW} | changes)


@pytest.mark.parametrize(
    "record", [a_step(), a_round(), a_round(committed=False), EventRecord(name="joined")]
)
def test_what_an_island_records_is_believed(record: Any) -> None:
    assert check_record(line(record), NOW) is not None


@pytest.mark.parametrize(
    "told",
    [
        "",
        "{}",
        "[" * 5000,
        '{"kind": "step"',
        line(a_step(), time=NOW + FUTURE_SECONDS + 1),
        line(a_step(), time=NOW - PAST_SECONDS - 1),
        line(a_step(), time=1e400),
        line(a_step(), tokens=1 << 62),
        line(a_step(), seconds=1e400),
        line(a_step(), tokens_per_second=1e400),
        line(a_step(), lr=float("nan")),
        line(a_step(), noise_scale={"signal": float("nan")}),
        line(a_round(), ranks=[[0, 1e400]]),
        line(a_round(), units=[[1 << 62, 1, 1]]),
        line(
            EvalRecord(round=1, tokens=1, loss=2.0, bits_per_byte=3.0), source_losses={"a": 1e400}
        ),
        line(a_step(), source_tokens={"x" * 65: 1}),
        line(a_step(), source_tokens={str(number): 1 for number in range(5000)}),
        line(a_round(), participants=["island"] * 5000),
        line(a_round(), participants=["x" * 65]),
        line(a_round(), gated={"x" * 65: 1}),
        line(a_round(), cause="x" * 2001),
        line(a_round(), wait_seconds=1e400),
        line(EventRecord(name="x" * 65)),
        line(EventRecord(name="joined", text="x" * 2001)),
    ],
)
def test_what_cannot_be_right_is_dropped(told: str) -> None:
    assert check_record(told, NOW) is None


def test_a_page_of_lies_leaves_the_records_that_are_right(tmp_path: Path) -> None:
    mirror = RecordsMirror(tmp_path / "island-0")
    good, now = to_line(a_step(7)), a_step().time
    lines = "\x00\u2028\n" + good + "{\n" + line(a_step(), time=now, tokens=1 << 70) + "\n"
    lines += line(a_step(), time=now, noise_scale={"noise": 1e400}) + "\n"
    mirror.add(RecordsPage(journal="ab", end=len(lines), size=len(lines), lines=lines))
    assert (mirror.num_dropped, (tmp_path / "island-0/metrics.jsonl").read_text()) == (4, good)
    view = RunView(tmp_path)
    view.read()
    assert [row[1] for row in view.islands["island-0"].rows["steps"]] == [7]


def test_a_page_is_no_longer_than_it_may_be() -> None:
    with pytest.raises(ValueError, match="lines"):
        RecordsPage(journal="", end=0, size=0, lines="x" * (PAGE_BYTES + 1))
