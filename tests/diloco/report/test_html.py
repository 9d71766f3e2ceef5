"""Summary, plots and report of runs whose records Metrics has written."""

import json
import math
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from diloco.records.metrics import StepRecord
from diloco.records.run_folder import RunFacts, read_run, write_facts
from diloco.report.html import TEMPLATE, write_report
from diloco.report.summary import (
    DATA_PARALLEL_FORMULA,
    summarise,
    summarise_records,
    traffic_ratio,
    write_summary,
)
from diloco.report.summary_table import describe_digests, print_summary
from diloco.report.timeline import merge_steps, round_segments
from inner.errors import InputError
from tests.diloco.report.sample_run import (
    INNER_STEPS,
    NUM_PARAMS,
    START,
    STEP_SECONDS,
    TOKENS,
    Island,
    write_baseline,
    write_run,
)


def report_of(*run_dirs: Path, out: Path | None = None) -> Path:
    """Write the report of a run from its folders, and return its path."""
    run = read_run(*run_dirs)
    return write_report(run, summarise_records(run), out)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "three")


def test_the_summary_counts_rounds_tokens_and_bytes(run_dir: Path) -> None:
    summary = summarise(run_dir)
    assert (summary["rounds_committed"], summary["rounds_aborted"]) == (8, 1)
    assert summary["digests_equal"] is True
    assert summary["steps"] == {"island-0": 80, "island-1": 50, "island-2": 50}
    assert summary["skipped_steps"] == {"island-0": 1, "island-1": 0, "island-2": 0}
    assert summary["tokens"] == (79 + 50 + 50) * TOKENS
    assert summary["bytes_sent"] == {
        "island-0": 36_000_000,
        "island-1": 16_000_000,
        "island-2": 24_000_000,
    }
    assert summary["final_eval_loss"] == pytest.approx(2 + 3.5 * math.exp(-4))
    assert (summary["baseline"], summary["loss_ratio"]) == (None, None)


def test_data_parallel_bytes_follow_the_formula_that_is_shown(run_dir: Path) -> None:
    summary = summarise(run_dir)
    assert summary["data_parallel_formula"] == DATA_PARALLEL_FORMULA
    assert summary["data_parallel_bytes"]["island-0"] == round(2 * 2 / 3 * 2 * NUM_PARAMS * 80)
    assert traffic_ratio(summary) == pytest.approx(2 * 2 / 3 * 2 * NUM_PARAMS * 180 / 76e6)


def test_the_clock_runs_from_the_first_inner_step_to_the_last_record(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert summarise(run_dir)["seconds"] == pytest.approx(
        max(i.events[-1].time for i in run.islands if i.events) - START
    )


def test_another_digest_of_one_island_is_found(run_dir: Path) -> None:
    path = run_dir / "island-2" / "metrics.jsonl"
    path.write_text(path.read_text().replace(f"{6:08x}", "deadbeef"))
    summary = summarise(run_dir)
    assert summary["digests_equal"] is False
    assert summary["rounds_disagreeing"] == [6]


def test_with_gossip_digests_differ_by_design_and_the_loss_is_the_mean_over_islands(
    run_dir: Path,
) -> None:
    for path in run_dir.glob("island-*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "round":
                line |= {"is_own": True, "digest": path.parent.name}
            if line["kind"] == "eval" and path.parent.name == "island-2":
                line["loss"] += 0.5
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary, last = summarise(run_dir), 2 + 3.5 * math.exp(-4)
    assert (summary["digests_equal"], summary["rounds_disagreeing"]) == (None, [])
    assert summary["final_eval_losses"] == pytest.approx({"island-0": last, "island-2": last + 0.5})
    assert summary["final_eval_loss"] == pytest.approx(last + 0.25)
    assert "DIFFERENT" not in report_of(run_dir).read_text()


def test_a_round_that_one_participant_committed_and_another_aborted_is_found(run_dir: Path) -> None:
    path = run_dir / "island-2" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "round" and line["round"] == 7:
            line["committed"] = False
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarise(run_dir)["rounds_disagreeing"] == [7]


def test_the_baseline_is_set_against_the_run(run_dir: Path) -> None:
    write_baseline(run_dir)
    summary = summarise(run_dir)
    ours = 2 + 3.5 * math.exp(-4)
    assert summary["loss_ratio"] == pytest.approx(ours / (ours - 0.03))
    assert summary["baseline"]["tokens"] == 80 * TOKENS
    assert summary["baseline"]["digests_equal"] is None


def test_summary_json_is_the_summary(run_dir: Path) -> None:
    write_baseline(run_dir)
    assert (
        write_summary(read_run(run_dir))
        == json.loads((run_dir / "summary.json").read_text())
        == summarise(run_dir)
    )


def test_without_run_json_what_depends_on_it_is_unknown(run_dir: Path) -> None:
    (run_dir / "run.json").unlink()
    summary = summarise(run_dir)
    assert (summary["name"], summary["num_params"], summary["data_parallel_bytes"]) == (
        "three",
        None,
        None,
    )
    assert "no run.json" in report_of(run_dir).read_text()


def test_one_island_sends_nothing_and_its_report_says_so(tmp_path: Path) -> None:
    Island(tmp_path, "island-0").inner_steps()
    write_facts(
        tmp_path, RunFacts(name="alone", num_params=NUM_PARAMS, num_islands=1, total_steps=10)
    )
    summary = summarise(tmp_path)
    assert summary["data_parallel_bytes"] == {"island-0": 0}
    assert summary["digests_equal"] is None
    page = report_of(tmp_path).read_text()
    assert "Nothing has been sent between islands yet." in page
    assert "No held-out loss has been recorded yet." in page


def test_the_printed_table_has_both_columns_and_takes_markup_as_text(run_dir: Path) -> None:
    write_baseline(run_dir)
    out = StringIO()
    print_summary(summarise(run_dir) | {"name": "[red]x"}, Console(file=out, width=100))
    assert "Run [red]x" in out.getvalue()
    assert "data-parallel baseline" in out.getvalue()
    assert re.search(r"Held-out loss.*2\.0641.*2\.0341", out.getvalue())


def test_the_report_links_only_files_that_are_there(run_dir: Path) -> None:
    write_baseline(run_dir)
    write_summary(read_run(run_dir))
    page = report_of(run_dir).read_text()
    assert "1M parameters on 3 islands, begun 2026-01-02 03:04 UTC" in page
    links = re.findall(r"(?:src|href)='([^']+)'", page)
    assert set(links) == {
        "plots/heldout.png",
        "plots/training-loss.png",
        "plots/bytes.png",
        "plots/timeline.png",
        "summary.json",
        "run.json",
    }
    assert all((run_dir / link).stat().st_size > 0 for link in links)


def test_the_report_shows_the_abort_and_escapes_its_cause(run_dir: Path) -> None:
    page = report_of(run_dir).read_text()
    assert "island &#39;island-1&#39; is lost: &lt;connection&gt; reset" in page
    assert "<connection>" not in page


@pytest.mark.parametrize(
    "content", ["", '{"kind": "step", "st', '{"kind": "event", "name": "joined", "time": 5.0}\n']
)
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path: Path, content: str) -> None:
    (tmp_path / "island-0").mkdir()
    (tmp_path / "island-0" / "metrics.jsonl").write_text(content)
    assert "No held-out loss has been recorded yet." in report_of(tmp_path).read_text()
    assert summarise(tmp_path)["final_eval_loss"] is None


def test_a_run_of_skipped_steps_only_has_a_report(tmp_path: Path) -> None:
    island = Island(tmp_path, "island-0")
    for step in (1, 2):
        record = StepRecord(
            step=step,
            tokens=0,
            loss=None,
            lr=0.1,
            grad_norm=None,
            seconds=0.0,
            tokens_per_second=0.0,
            skipped=True,
            time=9,
        )
        island.metrics.write(record)
    assert "No inner step with a loss has been recorded yet." in report_of(tmp_path).read_text()


def test_islands_have_the_names_that_their_config_gives(run_dir: Path) -> None:
    names = [island.name for island in read_run(run_dir).islands]
    (run_dir / names[0]).rename(run_dir / "paris")
    assert {island.name for island in read_run(run_dir).islands} == {*names[1:], "paris"}


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(f"no run in {str(tmp_path)!r}")):
        report_of(tmp_path)


def test_steps_without_a_pause_are_one_segment(run_dir: Path) -> None:
    merged = merge_steps(read_run(run_dir).islands[0].steps)
    assert len(merged) == 8
    assert [round(segment.seconds, 3) for segment in merged] == [INNER_STEPS * STEP_SECONDS] * 8


def test_a_committed_round_is_a_wait_then_a_reduce_and_an_aborted_one_is_whole(
    run_dir: Path,
) -> None:
    rounds = read_run(run_dir).islands[0].rounds
    committed, aborted = rounds[0], rounds[4]
    assert [(s.activity, round(s.seconds, 3)) for s in round_segments(committed)] == [
        ("wait", 0.4),
        ("reduce", 0.8),
    ]
    assert [(s.activity, round(s.seconds, 3)) for s in round_segments(aborted)] == [
        ("aborted", 1.2)
    ]


def test_the_moving_average_does_not_lag() -> None:
    from diloco.report.plots import moving_average

    assert moving_average([1.0, 2.0, 6.0, 10.0, 11.0], 1) == [1.5, 3.0, 6.0, 9.0, 10.5]
    assert moving_average([3.0, 5.0], 0) == [3.0, 5.0]


def test_the_template_is_in_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path)]
    root = Path(__file__).parents[3]
    result = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "diloco" / "report" / TEMPLATE).read_text() == (
        root / "diloco/report" / TEMPLATE
    ).read_text()


def test_importing_the_report_does_not_import_matplotlib_or_torch() -> None:
    program = (
        "import sys, diloco.report.html, diloco.simulate.dashboard; print({'torch', "
        "'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=True
    )
    assert result.stdout == b"set()\n"


# -- a run whose islands have their folders on several clusters ------------------------------------


def spread_out(run_dir: Path, folder: Path) -> tuple[Path, Path]:
    """Move island-2 into a folder of its own, as on another cluster. Returns both folders."""
    (folder / "there").mkdir()
    (run_dir / "island-2").rename(folder / "there/island-2")
    return run_dir, folder / "there"


def test_the_folders_of_several_clusters_make_the_report_of_one_run(
    run_dir: Path, tmp_path: Path
) -> None:
    whole = summarise(run_dir)
    here, there = spread_out(run_dir, tmp_path)
    assert summarise(here, there) == whole
    out = tmp_path / "out"
    write_summary(read_run(here, there), out)
    page = report_of(here, there, out=out).read_text()
    assert (
        "in every committed round<" in page
        and "Not in this report" not in page
        and (out / "plots").is_dir()
    )


def test_a_report_without_some_islands_speaks_of_the_others_only(
    run_dir: Path, tmp_path: Path
) -> None:
    here, _ = spread_out(run_dir, tmp_path)
    summary = summarise(here)
    assert (summary["islands_unread"], summary["num_islands"]) == (["island-2"], 3)
    assert describe_digests(summary) == "yes, of 2 of 3 islands"
    page = report_of(here).read_text()
    assert (
        "in every committed round, of 2 of 3 islands" in page
        and "Not in this report: island-2." in page
    )


def test_an_island_that_went_on_elsewhere_is_one_island(run_dir: Path, tmp_path: Path) -> None:
    whole = summarise(run_dir)
    path = run_dir / "island-0/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    elsewhere = tmp_path / "there/island-0/metrics.jsonl"
    elsewhere.parent.mkdir(parents=True)
    path.write_text("".join(lines[:40]))
    elsewhere.write_text("".join(lines[40:]))
    assert summarise(tmp_path / "there", run_dir) | {"name": ""} == whole | {"name": ""}


def test_records_do_not_count_twice(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is given twice"):
        summarise(run_dir, run_dir / ".")
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    with pytest.raises(InputError, match="one is a copy"):
        summarise(run_dir, copy)


def test_folders_of_different_runs_make_no_report(run_dir: Path, tmp_path: Path) -> None:
    here, there = spread_out(run_dir, tmp_path)
    (here / "config.yaml").write_text("name: a\n")
    (there / "config.yaml").write_text("name: a\nseed: 3\n")
    with pytest.raises(InputError, match="give the folders of one run"):
        summarise(here, there)
