"""`python -m scripts.gpu_report`: it runs on a CPU as it is, and what goes wrong is a line of the
report.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from diloco.planning.mesh.gpus import find_sheet
from diloco.watchdog.watchdog import HUNG
from inner.config import ParallelConfig
from inner.parallel.layout_check import check_layout
from scripts.gpu_report.meshes import MESHES, build_case
from scripts.gpu_report.numerics import list_cases
from scripts.gpu_report.place import Place, guarded
from scripts.gpu_report.sections import SECTIONS, Section, SectionReport, find_obstacle, run_apart
from scripts.gpu_report.step import STEPS, busy, describe_device, find_kernels
from scripts.gpu_report.training import TINY, TrainingCase
from tests.bare_python import make_python_without
from tests.harness import run_ranks

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
    if section.min_devices == 1 and section.name != "islands":
        rows = list(load_section(section.source)(Place("cpu", with_compile=False)))
        print("ROWS" + json.dumps([section.name, rows]), flush=True)
import os
os._exit(0)
"""
"""All sections that take one GPU, in one process, but the whole runs, which `test_the_whole_report`
has.
"""
MAY_BE_ABSENT = "hivemind", "datasets", "fastapi"
"""Packages that a machine for a short measurement need not have."""


@pytest.mark.timeout(GUARD_SECONDS + 60)
def test_the_sections_for_one_gpu_give_what_they_promise_on_a_cpu_without_optional_packages(
    tmp_path: Path,
):
    python = make_python_without(MAY_BE_ABSENT, tmp_path)
    assert find_installed(python, MAY_BE_ABSENT) == []
    done = subprocess.run(
        [python, "-c", HERE], cwd=ROOT, capture_output=True, text=True, timeout=GUARD_SECONDS
    )
    lines = [
        line.removeprefix("ROWS") for line in done.stdout.splitlines() if line.startswith("ROWS")
    ]
    found = dict(json.loads(line) for line in lines)
    names = [
        section.name
        for section in SECTIONS
        if section.min_devices == 1 and section.name != "islands"
    ]
    assert list(found) == names, done.stderr[-2000:]
    assert [
        row
        for rows in found.values()
        for row in rows
        if "problem" in row or not row.get("ok", True)
    ] == []
    speed = {row["name"]: row for row in found["speed-1b"]}
    for name in ("ours eager", "plain eager"):
        assert speed[name]["tokens_per_s"] > 0
        assert speed[name]["mfu_full_of_measured"] > speed[name]["mfu_causal_of_measured"] > 0
    assert speed["ours / plain"]["ratio"] > 0
    assert len(found["numerics"]) == 12 and len(found["memory"]) == 6
    step = {row["name"]: row for row in found["step"]}
    assert (
        step["crossings"]["budget"] > 0
        and 0 <= step["device, eager"]["idle_share"] < 1
        and len(step) > 5
    )
    assert {"snapshot (pseudo-gradient), later", "checkpoint"} <= {
        row["name"] for row in found["outer"]
    }
    assert found["attention"][0]["chosen"] and found["group"][-1]["exit_status"] == HUNG


def find_installed(python: Path, packages: tuple[str, ...]) -> list[str]:
    """Which of these packages that Python finds."""
    code = (
        f"import importlib.util; print(*[name for name in {packages} if "
        "importlib.util.find_spec(name)])"
    )
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.timeout(GUARD_SECONDS + 60)
def test_the_command_writes_its_report_as_text_and_as_json(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "scripts.gpu_report",
        "--device",
        "cpu",
        "--only",
        "environment",
    ]
    command += ["--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_SECONDS)
    assert done.returncode == 0 and "== environment: ended" in done.stdout, (
        done.stdout + done.stderr
    )
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
    assert rows == [
        {"name": "layers", "problem": "ZeroDivisionError: division by zero", "ok": False}
    ]


def test_sections_for_two_gpus_are_left_out_on_one():
    section = next(section for section in SECTIONS if section.name == "meshes")
    assert find_obstacle(section, 2) == ""
    assert find_obstacle(section, 1) == "it takes 2 GPUs, and torch finds 1"
    assert (
        SectionReport("meshes", "does not apply").is_good
        and not SectionReport("meshes", "left out").is_good
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_schedule_and_context_method_has_a_mesh_of_two_ranks_that_can_train_the_case(
    device: str,
):
    case = build_case(Place(device))
    for degrees, settings in MESHES.values():
        assert degrees.num_ranks == 2
        num_micro_batches = replace(case, degrees=degrees).work.num_micro_batches
        parallel = ParallelConfig.model_validate(settings)
        check_layout(case.sizes, degrees, parallel, case.seq_len, num_micro_batches)
    for key in ("schedule", "context"):
        allowed = get_args(ParallelConfig.model_fields[key].annotation)
        assert {settings[key] for _, settings in MESHES.values() if key in settings} == set(allowed)


def test_the_limits_of_the_sections_for_one_gpu_add_up_to_eight_minutes():
    assert sum(section.limit_seconds for section in SECTIONS if section.min_devices == 1) <= 8 * 60


def test_a_data_sheet_is_found_by_the_whole_name_of_a_device():
    sheet = find_sheet("NVIDIA H100 80GB HBM3")
    assert sheet is not None and sheet.flops == 989e12
    # Cards for PCIe are slower.
    assert find_sheet("NVIDIA H100 PCIe") is None


def test_what_matters_most_is_compared_first():
    cases = list(list_cases(Place("cuda")))
    assert cases[0] == ("bfloat16", False, "none", False) and len(set(cases)) == len(cases) == 16
    assert [case[0] for case in cases if case[3]] == ["bfloat16", "bfloat16", "float32", "float32"]
    assert [case for case in cases if not case[3]] == list(
        list_cases(Place("cuda", with_compile=False))
    )


def test_annotations_are_no_kernels_and_operations_are_named_with_their_own_time():
    watched = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with watched as profiled, torch.profiler.record_function("Optimizer.step#AdamW.step"):
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    events = profiled.events()
    assert events is not None and "Optimizer.step#AdamW.step" in {event.name for event in events}
    kernels = find_kernels(events, is_tiny=True)
    assert "aten::mm" in {kernel.name for kernel in kernels}
    assert "Optimizer.step#AdamW.step" not in {kernel.name for kernel in kernels}
    described = describe_device(kernels)
    assert 0 < sum(kernel.own_ms for kernel in kernels) <= described["step_ms"] * STEPS * 1.001


def test_weights_that_nobody_compares_are_filled_where_they_lie_and_differ():
    (drawn, again, filled) = run_ranks(find_first_losses, 1)[0]
    assert drawn == again != filled
    # Both begin as a model that knows nothing.
    assert [drawn, filled] == pytest.approx([math.log(TINY.vocab_size)] * 2, rel=0.05)


def find_first_losses(rank: int) -> list[float | None]:
    """With weights drawn from the seed, twice, and then filled in."""
    case = TrainingCase(TINY, 32, 2, "float32")
    trainers = [case.build("cpu", weights_matter=each) for each in (True, True, False)]
    return [trainer.step(case.windows(0)).loss for trainer in trainers]


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
