"""`diloco experiment` from end to end: real runs in processes of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco.cli.main import app
from diloco.config.schema import load_config
from diloco.records.run_folder import read_island, read_run
from scripts.finished_runs import keep, restore
from tests.diloco.experiments.tiny import write_tiny
from tests.swarm import GUARD_SECONDS


def start(path: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "diloco",
        "experiment",
        str(path),
        "--out",
        str(path.parent / "out"),
        *flags,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def run(path: Path, *flags: str) -> str:
    process = start(path, *flags)
    output, _ = process.communicate(timeout=2 * GUARD_SECONDS)
    assert process.returncode == 0, output
    return output


def finished(folder: Path) -> dict[str, str]:
    """The results of finished runs by folder."""
    return {
        path.parent.name: path.read_text() for path in (folder / "out/runs").glob("*/finished.json")
    }


def last_losses(folder: Path) -> dict[str, dict[str, float]]:
    rows = json.loads((folder / "out/results.json").read_text())["rows"]
    return {row["label"]: row["losses"] for row in rows}


def test_a_row_that_is_added_to_kept_results_runs_alone_and_the_report_has_all(
    tmp_path: Path,
) -> None:
    path = write_tiny(tmp_path, seeds=[0], axes=[{"outer.inner_steps": [4]}])
    plan = run(path, "--plan")
    assert "2 runs to make" in plan and "from a calibration" in plan
    assert finished(tmp_path) == {}
    first = run(path)
    assert "data-parallel AdamW, seed 0 begins" in first
    before = finished(tmp_path)
    assert len(before) == 2
    keep(tmp_path / "out", tmp_path / "kept.json")
    shutil.rmtree(tmp_path / "out")
    assert restore(tmp_path / "kept.json", tmp_path / "out") == 2

    second = run(write_tiny(tmp_path, seeds=[0], report={"against": "outer.inner_steps"}))
    assert [line for line in second.splitlines() if line.endswith("begins")] == [
        "Nesterov 0.7/0.9, H 8, 2 islands, bf16, seed 0 begins"
    ]
    after = {name: json.loads(text) for name, text in finished(tmp_path).items()}
    assert len(after) == 3 and {name: after[name] for name in before} == {
        n: json.loads(t) for n, t in before.items()
    }
    summary = (tmp_path / "out/summary.md").read_text()
    assert "| Nesterov 0.7/0.9, H 8, 2 islands, bf16 | 1 |" in summary
    assert sorted(path.stem for path in (tmp_path / "out/plots").iterdir()) == [
        "last-loss",
        "loss-bytes",
        "loss-tokens",
        "loss-wall-clock",
    ]
    assert len(last_losses(tmp_path)) == 3
    (made,) = [
        run_dir for run_dir in (tmp_path / "out/runs").iterdir() if run_dir.name not in before
    ]
    assert not list(made.glob("*/checkpoints"))
    assert load_config(made / "config.yaml").name == made.name


@pytest.mark.slow
def test_an_experiment_that_is_killed_in_the_middle_of_runs_ends_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    longer = {"step_tokens": 256, "tokens": 256 * 400, "evaluations": 3, "islands": 2}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    run(write_tiny(whole, overrides=longer, seeds=[0]))
    path = write_tiny(broken, overrides=longer, seeds=[0])
    process = start(path)
    deadline = time.monotonic() + GUARD_SECONDS
    while not (
        saved := list((broken / "out/runs").glob("*/island-1/checkpoints/step-*/manifest.json"))
    ):
        assert time.monotonic() < deadline, "no run has saved"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=GUARD_SECONDS)
    stopped = saved[0].parents[3]
    deadline = time.monotonic() + GUARD_SECONDS
    while is_held(stopped):
        assert time.monotonic() < deadline, "a run outlives the command"
        time.sleep(0.02)
    assert not (stopped / "finished.json").exists()
    output = run(path)
    assert "resumes, stopped after inner step" in output
    assert last_losses(broken) == last_losses(whole)
    assert any(event.name == "resumed" for event in read_run(stopped).islands[1].events)


def is_held(run_dir: Path) -> bool:
    """Whether a process still runs the islands of this folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir).encode() in (process / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


@pytest.mark.slow
def test_data_parallel_rows_train_as_the_baseline_of_simulate_does(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, seeds=[0], axes=[{"outer.inner_steps": [4]}])
    run(path, "--only", "data-parallel")
    (ours,) = (tmp_path / "out/runs").iterdir()
    (tmp_path / "out").rename(tmp_path / "first")
    run(path, "--only", "2")
    (islands,) = (tmp_path / "out/runs").iterdir()
    arguments = ["baseline", str(islands / "config.yaml"), "--islands", "2", "--ranks", "1"]
    arguments += ["name=plain", f"island.run_dir={tmp_path}"]
    subprocess.run(
        [sys.executable, "-m", "diloco", *arguments],
        check=True,
        timeout=GUARD_SECONDS,
        capture_output=True,
    )
    plain = read_island(tmp_path / "plain/baseline")
    steps = {
        record.step: record.loss
        for record in read_run(tmp_path / "first/runs" / ours.name).islands[0].steps
    }
    assert len(steps) == len(plain.steps) == 24
    for record in plain.steps:
        assert steps[record.step] == pytest.approx(record.loss, rel=1e-4)


def test_the_command_is_listed() -> None:
    assert "experiment" in {
        command.name or getattr(command.callback, "__name__", "")
        for command in app.registered_commands
    }
