"""`diloco simulate --resume` goes on with a run that was stopped, and ends with the bits of one
that never was.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.swarm import swarm

GUARD_SECONDS = 200.0
ROUNDS = 8
TLS = ["outer.transport=tls", "island.checkpoint.every_rounds=1", f"outer.rounds={ROUNDS}"]


def write_config(folder: Path) -> Path:
    with swarm(folder, *TLS, islands=[{"ranks": 1}, {"ranks": 1}]) as made:
        (folder / "run.yaml").write_text(json.dumps(made.config.model_dump(mode="json")))
    return folder / "run.yaml"


def simulate(config: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "diloco", "simulate", str(config), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=False
    )


def committed(folder: Path, name: str, island: int) -> dict[int, str]:
    path = folder / name / f"island-{island}" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return {
        each["round"]: each["digest"]
        for each in records
        if each["kind"] == "round" and each["committed"]
    }


@pytest.mark.parametrize("how", ["--in-process", pytest.param("", marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_goes_on_to_the_digest_of_one_that_was_not(
    tmp_path: Path, how: str
) -> None:
    config, words = write_config(tmp_path), list(filter(None, [how]))
    whole = simulate(config, "name=whole", *words)
    assert whole.wait(GUARD_SECONDS) == 0
    stopped = simulate(config, "name=stopped", *words)
    deadline = time.monotonic() + GUARD_SECONDS
    while len(committed(tmp_path, "stopped", 0)) < 3:
        assert time.monotonic() < deadline and stopped.poll() is None
        time.sleep(0.01)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(GUARD_SECONDS) == 130
    done = len(committed(tmp_path, "stopped", 0))
    assert done < ROUNDS
    assert simulate(config, "name=stopped", "--resume", *words).wait(GUARD_SECONDS) == 0
    for island in (0, 1):
        assert committed(tmp_path, "stopped", island) == committed(tmp_path, "whole", island)
    assert not (tmp_path / "stopped-2").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["name=none", "--resume"], b"--resume: there is no run in"),
        (["name=one", "outer.inner_steps=3", "--resume"], b"outer.inner_steps: here 3"),
        (["name=one", "--resume", "--baseline"], b"a baseline always starts"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    tmp_path: Path, words: list[str], problem: bytes
) -> None:
    config = write_config(tmp_path)
    (tmp_path / "one").mkdir()
    loaded = json.loads(config.read_text()) | {"name": "one"}
    (tmp_path / "one/config.yaml").write_text(json.dumps(loaded))
    refused = simulate(config, *words)
    output, _ = refused.communicate(timeout=GUARD_SECONDS)
    assert refused.returncode == 2 and problem in b" ".join(output.split())
