"""`python -m scripts.gpu_report`: it runs on a CPU as it is, and what goes wrong is a line of the report."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from inner.config import ParallelConfig
from inner.parallel.layout_check import check_layout
from scripts.gpu_report.meshes import MESHES, build_case
from scripts.gpu_report.place import Place, guarded
from scripts.gpu_report.sections import SECTIONS, Section, SectionReport, find_obstacle, run_apart
from scripts.gpu_report.step import busy

ROOT = Path(__file__).parents[2]
CPU = Place("cpu", with_compile=False)
BROKEN = "tests.integration.gpu_report_sections"
RUN_SECONDS = 3000
GUARD_SECONDS = 1200
HERE = """
import json
from scripts.gpu_report.place import Place
from scripts.gpu_report.sections import SECTIONS, load_section
for section in SECTIONS:
    if section.min_devices == 1:
        rows = list(load_section(section.source)(Place("cpu", with_compile=False)))
        print("ROWS" + json.dumps([section.name, rows]), flush=True)
import os
os._exit(0)
"""
"""All sections that take one GPU, in one process."""


@pytest.mark.timeout(GUARD_SECONDS + 60)
def test_the_sections_for_one_gpu_give_what_they_promise_on_a_cpu():
    command = [sys.executable, "-c", HERE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_SECONDS)
    lines = [line.removeprefix("ROWS") for line in done.stdout.splitlines() if line.startswith("ROWS")]
    found = dict(json.loads(line) for line in lines)
    assert list(found) == [section.name for section in SECTIONS if section.min_devices == 1], done.stderr[-2000:]
    assert [row for rows in found.values() for row in rows if "problem" in row or not row.get("ok", True)] == []
    assert all(row["tokens_per_s"] > 0 and row["mfu"] > row["mfu_causal"] > 0 for row in found["speed-1b"])
    assert len(found["numerics"]) == 12 and len(found["memory"]) == 6
    assert found["step"][0]["budget"] > 0 and len(found["step"]) > 5
    assert {"snapshot (pseudo-gradient)", "checkpoint"} <= {row["name"] for row in found["outer"]}


@pytest.mark.timeout(GUARD_SECONDS + 60)
def test_the_command_writes_its_report_as_text_and_as_json(tmp_path: Path):
    command = [sys.executable, "-m", "scripts.gpu_report", "--device", "cpu", "--only", "environment"]
    command += ["--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_SECONDS)
    assert done.returncode == 0 and "== environment: ended" in done.stdout, done.stdout + done.stderr
    (section,) = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert section["rows"][0]["torch"] in done.stdout and section["problem"] == ""


def test_a_section_that_crashes_keeps_its_rows_and_says_why():
    report = run_apart(Section("crash", f"{BROKEN}:crash", 60), CPU, 60)
    assert (report.status, report.rows) == ("failed", [{"name": "before", "value": 1}])
    assert "exit status -6" in report.problem and not report.is_good


def test_a_section_that_hangs_is_ended_and_keeps_its_rows():
    report = run_apart(Section("hang", f"{BROKEN}:hang", 60), CPU, 8)
    assert (report.status, report.rows) == ("out of time", [{"name": "before", "value": 1}])
    assert "did not end within 8 s" in report.problem and not report.is_good


def test_what_differs_is_marked_and_what_libraries_print_is_no_row():
    report = run_apart(Section("differ", f"{BROKEN}:differ", 60), CPU, 60)
    assert (report.status, report.rows) == ("ended", [{"name": "cpu", "ok": False}])
    assert "!  cpu" in report.text() and not report.is_good


def test_a_row_that_cannot_be_measured_does_not_end_its_section():
    rows = list(guarded("layers", lambda: {"value": 1 / 0}))
    assert rows == [{"name": "layers", "problem": "ZeroDivisionError: division by zero", "ok": False}]


def test_sections_for_two_gpus_are_left_out_on_one():
    section = next(section for section in SECTIONS if section.name == "meshes")
    assert find_obstacle(section, 2) == ""
    assert find_obstacle(section, 1) == "it takes 2 GPUs, and torch finds 1"
    assert SectionReport("meshes", "does not apply").is_good and not SectionReport("meshes", "left out").is_good


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_schedule_and_context_method_has_a_mesh_of_two_ranks_that_can_train_the_case(device: str):
    case = build_case(Place(device))
    for degrees, settings in MESHES.values():
        assert degrees.num_ranks == 2
        num_micro_batches = replace(case, degrees=degrees).work.num_micro_batches
        parallel = ParallelConfig.model_validate(settings)
        check_layout(case.sizes, degrees, parallel, case.seq_len, num_micro_batches)
    for key in ("schedule", "context"):
        allowed = get_args(ParallelConfig.model_fields[key].annotation)
        assert {settings[key] for _, settings in MESHES.values() if key in settings} == set(allowed)


def test_busy_time_counts_kernels_that_overlap_once():
    assert busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS + 60)
def test_the_whole_report_is_good_on_a_cpu(tmp_path: Path):
    command = [sys.executable, "-m", "scripts.gpu_report", "--device", "cpu", "--minutes", "50"]
    command += ["--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [section["status"] for section in report["sections"]] == ["ended"] * len(SECTIONS)
