"""All places show the same figures of a run: a real one with a join, an abort, a leave, and a kill
and a return.
"""

import io
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from rich.console import Console

from diloco.formatting import human_bytes, human_count, human_loss
from diloco.records.figures import LatestRecords
from diloco.records.run_folder import METRICS, Tail, read_run
from diloco.report.html import write_report
from diloco.report.summary import summarise_records
from diloco.simulate.dashboard import RunState, format_status_line
from diloco.status.command import find_status
from diloco.status.table import format_run
from diloco.watch.prometheus import metrics_text
from diloco.watch.terminal import render
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView
from diloco.watch.view.state import state_now
from tests.faults.forked import train_at_pace
from tests.faults.waits import until
from tests.swarm import Island, read_records, swarm

NUM_ROUNDS = 100_000
NUM_STEPS = 2 * NUM_ROUNDS
STEP_TOKENS = 512
NAMES = ("island-0", "island-1", "island-2")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose second island sends nan, is killed and comes back, and whose third
    joins and leaves.
    """
    folder = tmp_path_factory.mktemp("storm")
    settings = (f"outer.rounds={NUM_ROUNDS}", "outer.start_islands=2", "evaluate.every_rounds=2")
    with swarm(
        folder, *settings, islands=[{}, {"faults": ["nan:1@round=2"]}, {"joins": True}]
    ) as made:
        pace = train_at_pace(0.05)
        first, second = (made.start(index, pace) for index in (0, 1))
        first.wait_for_round(3)
        third = made.start(2, pace)
        until(
            lambda: len(third.committed()) >= 2,
            "rounds with the third island",
            first,
            second,
            third,
        )
        end(third)
        second.signal(signal.SIGKILL)
        second.wait()
        made_before = len(second.committed())
        second = made.start(1, pace)
        until(
            lambda: len(second.committed()) >= made_before + 2,
            "the return of the second island",
            first,
            second,
        )
        end(first)
        end(second)
        return first.folder.parent


def end(island: Island) -> None:
    island.signal(signal.SIGTERM)
    island.wait()


@pytest.fixture(scope="module")
def truth(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The figures of each island by its lines in metrics.jsonl, counted here anew."""
    return {name: count(read_records(run_dir / name / METRICS)) for name in NAMES}


def count(records: list[dict[str, Any]]) -> dict[str, Any]:
    steps, rounds, evals = (
        [r for r in records if r["kind"] == kind] for kind in ("step", "round", "eval")
    )
    commits = [r for r in rounds if r["committed"]]
    return {
        "step": steps[-1]["step"],
        "round": commits[-1]["round"] + 1,
        "commits": {r["round"] for r in commits},
        "aborts": {(r["round"], r["attempt"]) for r in rounds if not r["committed"]},
        "tokens": STEP_TOKENS * len(steps),
        "loss": steps[-1]["loss"],
        "heldout_loss": evals[-1]["loss"],
        "evaluated": evals[-1]["round"],
        "speed": steps[-1]["tokens_per_second"],
        "bytes_sent": sum(r["bytes_sent"] for r in rounds),
        "digest": commits[-1]["digest"],
    }


def row_of(island: dict[str, Any]) -> str:
    """A pattern of the island's row in a table of `diloco status` or `diloco watch --text`."""
    cells = (
        f"{island['step']}/{NUM_STEPS}",
        str(island["round"]),
        human_loss(island["loss"]),
        human_loss(island["heldout_loss"]),
        human_count(island["speed"]),
        f"{len(island['commits'])}/{len(island['aborts'])}",
        human_bytes(island["bytes_sent"]),
        island["digest"][:8],
    )
    return r"\s+".join(map(re.escape, cells))


def union(truth: dict[str, dict[str, Any]], key: str) -> int:
    return len(set().union(*(island[key] for island in truth.values())))


def test_the_run_had_what_the_others_count(run_dir: Path, truth: dict[str, dict[str, Any]]) -> None:
    assert union(truth, "aborts") > 0 and len(truth["island-2"]["commits"]) < union(
        truth, "commits"
    )
    own = [r["tokens"] for r in read_records(run_dir / "island-1" / METRICS) if r["kind"] == "step"]
    assert any(after <= before for before, after in pairwise(own)), "its own total began anew"


def test_status_shows_them(run_dir: Path, truth: dict[str, dict[str, Any]]) -> None:
    (seen,) = find_status(str(run_dir), [], None)
    text = "\n".join(format_run(seen))
    assert f": 3 islands, {newest(truth)} of {NUM_ROUNDS} rounds" in text
    assert_rows(text, truth)
    told = seen.to_json()
    assert (told["num_rounds"], told["num_steps"], told["round"]) == (
        NUM_ROUNDS,
        NUM_STEPS,
        newest(truth),
    )
    assert_values(told["islands"], truth)


def newest(truth: dict[str, dict[str, Any]]) -> int:
    return max(island["round"] for island in truth.values())


def assert_rows(text: str, truth: dict[str, dict[str, Any]]) -> None:
    for name, island in truth.items():
        assert re.search(rf"{name}\s.*{row_of(island)}", text), (
            f"{row_of(island)} is not in\n{text}"
        )


def assert_values(islands: list[dict[str, Any]], truth: dict[str, dict[str, Any]]) -> None:
    keys = ("step", "round", "tokens", "loss", "heldout_loss", "bytes_sent", "digest")
    assert {each["name"]: [each[key] for key in keys] for each in islands} == {
        name: [island[key] for key in keys] for name, island in truth.items()
    }


def test_watch_shows_them_as_text_and_as_json(
    run_dir: Path, truth: dict[str, dict[str, Any]]
) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    prediction = RunPrediction(RunView(run_dir))
    console.print(render(prediction))
    text = console.export_text()
    assert_rows(text, truth)
    state = prediction.state()
    assert_values(state["islands"], truth)
    assert f"the {NUM_ROUNDS - newest(truth)} rounds to come" in text
    assert (state["num_rounds"], state["round"], state["num_islands"]) == (
        NUM_ROUNDS,
        newest(truth),
        3,
    )
    assert (state["committed"], state["aborted"]) == (
        union(truth, "commits"),
        union(truth, "aborts"),
    )
    assert state["tokens"] == sum(island["tokens"] for island in truth.values())


def test_the_page_gets_them(run_dir: Path, truth: dict[str, dict[str, Any]]) -> None:
    view = RunView(run_dir)
    snapshot = view.snapshot(view.read())
    assert snapshot["num_rounds"] == NUM_ROUNDS
    assert snapshot["figures"]["tokens"] == sum(island["tokens"] for island in truth.values())
    for name, island in truth.items():
        rows = snapshot["islands"][name]
        assert (rows["steps"][-1][1], rows["steps"][-1][2]) == (island["step"], island["tokens"])
        assert rows["rounds"][-1][6:9] == [
            island["bytes_sent"],
            len(island["commits"]),
            len(island["aborts"]),
        ]
        assert rows["rounds"][-1][19] == island["round"]


def test_prometheus_gets_them(run_dir: Path, truth: dict[str, dict[str, Any]]) -> None:
    view = RunView(run_dir)
    view.read()
    lines = metrics_text([state_now(view)]).splitlines()
    for name, island in truth.items():
        for family, value in samples(island):
            assert f'diloco_{family}{{run="test",island="{name}"}} {value!r}' in lines


def samples(island: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((key, island[key]) for key in ("step", "round", "loss", "heldout_loss"))
    yield from ((f"{key}_total", island[key]) for key in ("tokens", "bytes_sent"))
    yield "committed_total", len(island["commits"])
    yield "aborted_total", len(island["aborts"])


def test_the_summary_and_the_report_show_them(
    run_dir: Path, truth: dict[str, dict[str, Any]]
) -> None:
    run = read_run(run_dir)
    summary = summarise_records(run)
    assert summary["num_islands"] == 3
    assert summary["tokens"] == sum(island["tokens"] for island in truth.values())
    assert summary["bytes_sent"] == {name: island["bytes_sent"] for name, island in truth.items()}
    assert summary["rounds_committed"] == union(truth, "commits")
    assert summary["rounds_aborted"] == union(truth, "aborts")
    assert summary["final_eval_loss"] == last_evaluated(truth)["heldout_loss"]
    html = write_report(run, summary, run_dir.parent / "out").read_text()
    for name, island in truth.items():
        (row,) = re.findall(rf"<td>{name}</td>(?:\s*<td>[^<]*</td>)+", html)
        shown = (
            human_count(island["tokens"]),
            str(len(island["commits"])),
            human_bytes(island["bytes_sent"]),
        )
        assert all(f"<td>{cell}</td>" in row for cell in shown)


def last_evaluated(truth: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return max(truth.values(), key=lambda island: island["evaluated"])


def test_the_dashboard_shows_them(run_dir: Path, truth: dict[str, dict[str, Any]]) -> None:
    islands = [LatestRecords(name) for name in NAMES]
    for island in islands:
        for record in Tail(run_dir / island.figures.name / METRICS).new_records():
            island.write(record)
    line = format_status_line(RunState(islands, NUM_STEPS))
    step = max(island["step"] for island in truth.values())
    decided = f"{union(truth, 'commits')} committed {union(truth, 'aborts')} aborted"
    sent = human_bytes(sum(island["bytes_sent"] for island in truth.values()))
    assert f"step {step}/{NUM_STEPS} | round {newest(truth)} | {decided} | loss " in line
    assert (
        f"| held-out {human_loss(last_evaluated(truth)['heldout_loss'])} |" in line
        and line.endswith(f"sent {sent}")
    )


def test_the_first_lines_are_the_same_everywhere(
    run_dir: Path, truth: dict[str, dict[str, Any]]
) -> None:
    (seen,) = find_status(str(run_dir), [], None)
    assert seen.overview is not None
    headline, since = seen.overview.head
    run = read_run(run_dir)
    summary = summarise_records(run)
    assert (summary["headline"], summary["since"]) == (headline, since)
    html = write_report(run, summary, run_dir.parent / "out").read_text()
    assert escape(headline) in html and escape(since) in html
    view = RunView(run_dir)
    snapshot = view.snapshot(view.read())
    assert snapshot["overview"]["headline"]["text"] == headline
    state = RunPrediction(view).state()
    assert (state["headline"]["text"], state["since"]) == (headline, since)
    assert f"round {newest(truth)} of {NUM_ROUNDS}" in headline
    assert f"held-out {human_loss(last_evaluated(truth)['heldout_loss'])}" in headline
    assert f"{human_bytes(sum(island['bytes_sent'] for island in truth.values()))} sent" in headline


def test_the_kill_the_join_and_the_aborts_are_told(
    run_dir: Path, truth: dict[str, dict[str, Any]]
) -> None:
    (seen,) = find_status(str(run_dir), [], None)
    assert seen.overview is not None
    assert (
        re.search(r"island-1 died once", seen.overview.since)
        and "island-2 joined" in seen.overview.since
    )
    count = union(truth, "aborts")
    assert f"{count} attempt{'s' if count > 1 else ''} aborted" in seen.overview.since
    summary = summarise_records(read_run(run_dir))
    assert summary["islands_late"].keys() == {"island-2"}
    assert summary["islands_gone"].keys() == set(NAMES), "all were stopped before the run was over"
