"""The dashboard: a table on a terminal, plain lines elsewhere."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from diloco.formatting import human_bytes, human_count, human_seconds, one_line
from diloco.records.figures import LatestRecords
from diloco.records.metrics import EvalRecord, EventRecord, Metrics, RoundRecord
from diloco.simulate.dashboard import COLUMNS, Dashboard, RunState, format_status_line, table_rows
from tests.diloco import sample_records
from tests.diloco.sample_records import a_step


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def a_round(number: int, committed: bool = True, cause: str | None = None) -> RoundRecord:
    return sample_records.a_round(
        number, committed, cause=cause, bytes_sent=1_500_000, bytes_received=1_500_000
    )


def a_dashboard(
    tmp_path: Path, *, force_terminal: bool = False
) -> tuple[Dashboard, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(
        file=out, force_terminal=force_terminal, width=100, _environ={"TERM": "xterm"}
    )
    return (
        Dashboard(tmp_path, ["island-0", "island-1"], 60, console=console, clock=clock),
        out,
        clock,
    )


def test_a_row_shows_the_last_of_everything() -> None:
    island = LatestRecords("island-0")
    for record in (
        a_step(1),
        a_step(2, loss=2.25),
        a_round(0),
        a_round(1, committed=False, cause="island 'island-1' is lost"),
        EvalRecord(round=0, tokens=2048, loss=2.75, bits_per_byte=3.97),
    ):
        island.write(record)
    (row,) = table_rows(RunState([island], total_steps=60))
    shown = dict(zip(COLUMNS, row, strict=False))
    assert shown["step"] == "2/60"
    assert shown["loss"] == "2.2500"
    assert shown["tok/s"] == "5.12k"
    assert (shown["round"], shown["peers"], shown["ok/abort"]) == ("1", "2", "1/1")
    assert shown["sent"] == "3 MB"
    assert shown["held-out"] == "2.7500"
    assert row[-1] == "round 1 aborted: island 'island-1' is lost"


def test_an_island_that_has_written_nothing_has_a_row() -> None:
    assert table_rows(RunState([LatestRecords("island-1")], 60)) == [
        ("island-1", "0/60", "-", "-", "0", "-", "0/0", "0 B", "-", "")
    ]


def test_a_skipped_step_keeps_the_last_loss() -> None:
    island = LatestRecords("island-0")
    island.write(a_step(1, loss=2.5))
    island.write(a_step(2, loss=None))
    assert (island.figures.step, island.figures.loss) == (2, 2.5)


def test_text_from_a_peer_cannot_steer_the_terminal() -> None:
    island = LatestRecords("island-0")
    island.write(a_round(3, committed=False, cause="bad\x1b[2J\nround 4 committed"))
    event = island.figures.event
    assert event is not None and "\x1b" not in event and "\n" not in event


def test_plain_lines_come_once_a_round_and_have_no_escape_codes(tmp_path: Path) -> None:
    metrics = [Metrics(tmp_path / name / "metrics.jsonl") for name in ("island-0", "island-1")]
    dashboard, out, _ = a_dashboard(tmp_path)
    with dashboard:
        dashboard.update()
        assert out.getvalue() == ""
        for number in range(3):
            for island in metrics:
                island.write(a_round(number))
                dashboard.update()
        assert out.getvalue().count("\n") == 3
    assert "round 3 | 3 committed 0 aborted" in out.getvalue().splitlines()[-1]
    assert "\x1b" not in out.getvalue()


def test_plain_lines_come_every_few_seconds_without_rounds(tmp_path: Path) -> None:
    dashboard, out, clock = a_dashboard(tmp_path)
    for _ in range(40):
        clock.now += 0.25
        dashboard.update()
    assert out.getvalue().count("\n") == 2


def test_an_event_has_its_own_plain_line(tmp_path: Path) -> None:
    dashboard, out, _ = a_dashboard(tmp_path)
    Metrics(tmp_path / "island-1" / "metrics.jsonl").write(
        EventRecord(name="joined", text="at round 4")
    )
    dashboard.update()
    assert out.getvalue() == "island-1 joined: at round 4\n"


@pytest.mark.parametrize("width", [60, 80, 140])
def test_on_a_terminal_the_table_redraws_itself_and_fits(tmp_path: Path, width: int) -> None:
    Metrics(tmp_path / "island-0" / "metrics.jsonl").write(a_step(30))
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, color_system=None, width=width, _environ={"TERM": "xterm"}
    )
    with Dashboard(tmp_path, ["island-0", "island-1"], 60, console=console) as dashboard:
        dashboard.update()
        dashboard.update()
    assert "\x1b[" in out.getvalue()
    if width >= 80:
        assert "30/60" in out.getvalue()
        assert "held-out" in out.getvalue()


def test_the_plain_line_shows_the_newest_held_out_loss_not_the_lowest() -> None:
    early, late = LatestRecords("island-0"), LatestRecords("island-1")
    early.write(EvalRecord(round=1, tokens=10, loss=2.0, bits_per_byte=None))
    late.write(EvalRecord(round=2, tokens=20, loss=2.5, bits_per_byte=None))
    assert "held-out 2.5000" in format_status_line(RunState([early, late], 60))


def test_numbers_are_read_in_decimal_units() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 12_345_678, 999_999)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 MB",
        "1 MB",
    ]
    assert [human_count(n) for n in (None, 512, 1.5e6)] == ["-", "512", "1.5M"]
    assert [human_seconds(n) for n in (0.25, 599.0, 3723, 7199)] == [
        "0.2 s",
        "599.0 s",
        "1 h 02 min",
        "2 h 00 min",
    ]
    assert one_line("a\tb\x1b[0m") == "a b [0m"


def test_the_plain_line_of_many_islands_shows_the_range_of_their_losses() -> None:
    islands = [LatestRecords(f"island-{number}") for number in range(32)]
    assert "| loss - - - - - - |" in format_status_line(RunState(islands, 60))
    for number in range(31):
        islands[number].write(a_step(1, loss=2.5 + number / 100))
    assert "| loss 2.5000 to 2.8000 |" in format_status_line(RunState(islands, 60))
