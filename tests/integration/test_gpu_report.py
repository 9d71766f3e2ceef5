"""`python -m scripts.gpu_report`: it runs on a CPU as it is, and what goes wrong is a line of the report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_report.place import Place, guarded
from scripts.gpu_report.sections import SECTIONS, Section, run_apart
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
    rows = list(load_section(section.source)(Place("cpu", with_compile=False)))
    print("ROWS" + json.dumps([section.name, rows]), flush=True)
import os
os._exit(0)
"""
"""All sections, in one process."""


@pytest.mark.timeout(GUARD_SECONDS + 60)
def test_each_section_gives_what_it_promises_on_a_cpu():
    command = [sys.executable, "-c", HERE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_SECONDS)
    lines = [line.removeprefix("ROWS") for line in done.stdout.splitlines() if line.startswith("ROWS")]
    found = dict(json.loads(line) for line in lines)
    assert list(found) == [section.name for section in SECTIONS], done.stderr[-2000:]
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
