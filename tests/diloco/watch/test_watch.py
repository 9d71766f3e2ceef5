"""The page's data and server, from folders that the real record classes have written."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")

import httpx

from diloco.records.faults import FaultRecord, record_fault
from diloco.records.logbook import Logbook
from diloco.records.metrics import EvalRecord, EventRecord, Metrics
from diloco.watch.feed import Feed
from diloco.watch.prometheus import metrics_text
from diloco.watch.server import build_app, is_loopback
from diloco.watch.view.history import MAX_POINTS, TAIL_ROWS
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView, parse_entry, parse_fault
from diloco.watch.view.state import state_now
from inner.errors import InputError
from tests.diloco.sample_records import a_round, a_step


def write_island(run_dir: Path, name: str = "island-0") -> Metrics:
    metrics = Metrics(run_dir / name / "metrics.jsonl")
    metrics.write(EventRecord(name="joined", text="at round 0", time=100.0))
    metrics.write(a_step(1))
    metrics.write(a_round(0))
    metrics.write(a_round(1, committed=False))
    metrics.write(EvalRecord(round=0, tokens=512, loss=2.25, bits_per_byte=None))
    return metrics


def read_view(run_dir: Path) -> RunView:
    view = RunView(run_dir)
    view.read()
    return view


def snapshot_of(run_dir: Path) -> dict[str, Any]:
    view = RunView(run_dir)
    return view.snapshot(view.read())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_island(tmp_path).close()
    Logbook(tmp_path, "island-0").note("started", "config ab12, on vm")
    record_fault(
        tmp_path,
        FaultRecord(
            spec="kill:0@round=1", kind="kill", islands=("island-0",), text="killed", time=9.0
        ),
    )
    return tmp_path


def get_from(app: Any, path: str, method: str = "GET", **options) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def get(run_dir: Path, path: str, token: str | None = None, **options) -> httpx.Response:
    return get_from(build_app([read_view(run_dir)], token), path, **options)


def test_the_state_is_that_of_the_last_records(run_dir: Path) -> None:
    (island,) = state_now(read_view(run_dir))["islands"]
    keys = ("name", "step", "loss", "heldout_loss", "committed", "aborted", "bytes_sent")
    assert [island[key] for key in keys] == ["island-0", 1, 2.5, 2.25, 1, 1, 2000]


def test_a_second_read_brings_only_what_is_new(tmp_path: Path) -> None:
    metrics, view = write_island(tmp_path), RunView(tmp_path)
    sent = view.read()
    metrics.write(a_step(2))
    metrics.close()
    new = view.between(sent, view.read())["islands"]["island-0"]
    assert ([row[1] for row in new["steps"]], new["rounds"], new["events"]) == ([2], [], [])


def test_the_snapshot_has_faults_and_logbook(run_dir: Path) -> None:
    snapshot = snapshot_of(run_dir)
    assert snapshot["faults"] == [[9.0, "kill", ["island-0"], "killed", 0]]
    assert [note[1:] for note in snapshot["notes"]] == [["island-0", "started: config ab12, on vm"]]


def test_damaged_lines_are_passed_over(run_dir: Path) -> None:
    for name in ("island-0/metrics.jsonl", "faults.jsonl", "LOGBOOK.md"):
        with (run_dir / name).open("ab") as file:
            file.write(b'\xff\xfe{"kind": "step"\n{"time": 1e400}\n[]\n' + b"[" * 5000 + b"\n{")
    view = read_view(run_dir)
    assert (len(view.islands["island-0"].rows["steps"]), len(view.faults), len(view.notes)) == (
        1,
        1,
        1,
    )


@pytest.mark.parametrize("line", ["- 2026-13-45 99:99:99Z **a** b", "- nothing", ""])
def test_what_is_no_entry_of_the_logbook_is_no_row(line: str) -> None:
    assert parse_entry(line) is None


@pytest.mark.parametrize(
    "line", ["{}", '{"time": NaN, "islands": [], "text": "", "kind": "", "is_end": 0}', "3"]
)
def test_what_is_no_fault_is_no_row(line: str) -> None:
    assert parse_fault(line) is None


def test_losses_that_json_lacks_are_left_out(run_dir: Path) -> None:
    line = json.dumps(
        {
            "kind": "eval",
            "round": 1,
            "tokens": 1,
            "loss": float("nan"),
            "bits_per_byte": None,
            "time": 5,
        }
    )
    with (run_dir / "island-0/metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert json.loads(json.dumps(snapshot_of(run_dir), allow_nan=False))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run in"):
        RunView(tmp_path)


def test_a_long_run_is_thinned_and_keeps_its_last_round(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "island-0" / "metrics.jsonl")
    for number in range(3 * MAX_POINTS):
        metrics.write(a_step(number))
        metrics.write(a_round(number))
    metrics.close()
    rows = snapshot_of(tmp_path)["islands"]["island-0"]
    assert max(len(each) for each in rows.values()) <= MAX_POINTS + TAIL_ROWS
    assert (rows["rounds"][-1][1], rows["rounds"][-1][6]) == (3 * MAX_POINTS - 1, 3000 * MAX_POINTS)


def test_each_page_gets_what_is_new_to_it(tmp_path: Path) -> None:
    metrics, view = write_island(tmp_path), RunView(tmp_path)
    first = view.read()
    metrics.write(a_round(2, participants=("island-0",)))
    metrics.close()
    second, later = view.read(), view.read()
    assert view.between(first, later)["groups"] == [("island-0",)]
    assert not any(view.between(second, later).values())


def test_the_stream_begins_with_a_snapshot(run_dir: Path) -> None:
    async def first() -> str:
        return await anext(Feed(RunPrediction(read_view(run_dir))).events())

    assert asyncio.run(first()).startswith("event: snapshot\ndata: {")


@pytest.mark.parametrize(
    "path", ["/", "/page/page.js", "/page/uplot-1.6.32.iife.min.js", "/state", "/metrics"]
)
def test_the_page_its_files_and_its_figures_are_served(run_dir: Path, path: str) -> None:
    answer = get(run_dir, path)
    assert (
        answer.status_code,
        "default-src 'self'" in answer.headers["content-security-policy"],
    ) == (200, True)


@pytest.mark.parametrize(
    "path", ["/page/..%2fserver.py", "/page/server.py", "/page/uplot-LICENSE", "/docs"]
)
def test_nothing_else_is_served(run_dir: Path, path: str) -> None:
    assert get(run_dir, path).status_code == 404


def test_another_name_of_this_machine_is_refused(run_dir: Path) -> None:
    assert get(run_dir, "/state", headers={"host": "elsewhere.example"}).status_code == 400


@pytest.mark.parametrize("path", ["/", "/state", "/events", "/page/page.js", "/state?token=wrong"])
def test_without_the_token_nothing_is_told(run_dir: Path, path: str) -> None:
    assert get(run_dir, path, token="secret").status_code == 403


def test_the_token_opens_the_page_and_is_kept_in_a_cookie(run_dir: Path) -> None:
    answer = get(run_dir, "/?token=secret", token="secret")
    assert (answer.status_code, "HttpOnly" in answer.headers["set-cookie"]) == (200, True)
    assert (
        get(
            run_dir, "/metrics", token="secret", headers={"authorization": "Bearer secret"}
        ).status_code
        == 200
    )


def test_prometheus_gets_a_sample_of_each_figure(run_dir: Path) -> None:
    text = metrics_text([state_now(read_view(run_dir))])
    assert f'diloco_bytes_sent_total{{run="{run_dir.name}",island="island-0"}} 2000\n' in text


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("me", False)]
)
def test_a_token_is_needed_beyond_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
