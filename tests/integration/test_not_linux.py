"""Where a system lacks what Linux alone has, islands train all the same, and what cannot be done is
refused.

tests/not_linux/sitecustomize.py takes it away from all processes of a run. No other system has been
seen.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.swarm import GUARD_SECONDS, TEXT, TINY

ROOT = Path(__file__).parents[2]
NOT_LINUX = Path(__file__).parents[1] / "not_linux"
WHOSE = "DILOCO_TEST_RUN"
"""An environment variable with the folder of the test in every process of its run."""
needs_ps = pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps, which macOS has")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A folder with a config, and text of its own."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / f"text/{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    own = TINY.replace("source: files", f"source: files, paths: [{tmp_path}/text]")
    own = own.replace("island: {", f"island: {{run_dir: {tmp_path}, cache_dir: {tmp_path}/cache, ")
    (tmp_path / "run.yaml").write_text(own)
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command of Python as on another system than Linux."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{NOT_LINUX}",
        "OMP_NUM_THREADS": "1",
        WHOSE: str(folder),
    }
    command = [sys.executable, *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def simulate(folder: Path, *words: str) -> None:
    """Run `diloco simulate` there. It must succeed, with equal digests and nothing left running."""
    process = start(folder, "-m", "diloco", "simulate", "run.yaml", "--islands", "2", *words)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    summary = json.loads((folder / "test" / "summary.json").read_text())
    assert summary["digests_equal"] and summary["rounds_committed"] > 0
    assert processes_of(folder) == []


def refusal(folder: Path, *words: str) -> str:
    """The message with which `diloco simulate` refuses there, on one line."""
    process = start(folder, "-m", "diloco", "simulate", "run.yaml", *words)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 2, output
    return " ".join(output.split())


def processes_of(folder: Path) -> list[int]:
    """The processes of a test's runs that have not ended."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"{WHOSE}={folder}".encode() in (each / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_ours:
            found.append(int(each.name))
    return found


def test_what_linux_alone_has_is_gone(tmp_path: Path) -> None:
    program = """
import ctypes, os, select, socket
from pathlib import Path
gone = ("memfd_create", "sched_getaffinity", "posix_fallocate", "pidfd_open")
assert not any(hasattr(os, name) for name in gone)
assert not hasattr(ctypes.CDLL(None), "prctl") and hasattr(ctypes.CDLL(None), "getpid")
assert not hasattr(select, "epoll") and not hasattr(socket, "TCP_USER_TIMEOUT")
assert not Path("/proc").is_dir() and not list(Path("/proc").glob("*"))
assert not os.path.exists("/dev/shm")
assert not os.access("/proc/self/stat", os.R_OK) and Path(".").is_dir()
for read in (Path.read_text, os.stat, open, os.listdir):
    try:
        read(Path("/proc/self/stat"))
    except FileNotFoundError:
        continue
    raise AssertionError(read)
"""
    process = start(tmp_path, "-c", program)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


@needs_ps
@pytest.mark.parametrize(
    "words", [("--in-process",), ("--ranks", "2", "outer.transport=tls"), ("--ranks", "2")]
)
def test_two_islands_train(run_folder: Path, words: tuple[str, ...]) -> None:
    simulate(run_folder, *words)
    log = "".join(path.read_text() for path in (run_folder / "test").glob("island-*/log.txt"))
    # gloo alone has a port that stays open.
    assert ("gloo's port stays open" in log) == (words == ("--ranks", "2"))


@needs_ps
def test_islands_train_on_shards_that_are_made_in_the_run(run_folder: Path) -> None:
    simulate(run_folder, "--in-process", "data.order=shards")


@needs_ps
def test_an_island_is_killed_with_all_its_ranks_and_comes_back(run_folder: Path) -> None:
    fault = "kill:1@round=1,back=0"
    simulate(run_folder, "--ranks", "2", "outer.transport=tls", "outer.rounds=40", "--fault", fault)
    faults = [
        json.loads(line) for line in (run_folder / "test" / "faults.jsonl").read_text().splitlines()
    ]
    assert any("killed island-1" in json.dumps(each) for each in faults)


def test_nothing_is_left_when_the_launcher_is_killed(run_folder: Path) -> None:
    words = ("--islands", "2", "--ranks", "2", "outer.transport=tls", "outer.rounds=100000")
    process = start(run_folder, "-m", "diloco", "simulate", "run.yaml", *words)
    deadline = time.monotonic() + GUARD_SECONDS
    metrics = run_folder / "test" / "island-0" / "metrics.jsonl"
    try:
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(processes_of(run_folder)) > 5
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    while processes_of(run_folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(run_folder) == []


@pytest.mark.parametrize(
    ("words", "what", "cure"),
    [
        (
            ["--netns"],
            "network namespace, which Linux alone has",
            "leave them out, or run the simulation on Linux",
        ),
        (
            ["--fault", "kill:1@round=1,process=rank0"],
            "(rank0) is found in /proc",
            "so that the whole island is hit",
        ),
    ],
)
def test_what_only_linux_can_do_is_refused_with_the_cure(run_folder, words, what, cure) -> None:
    said = refusal(run_folder, "--islands", "2", "--ranks", "2", "outer.transport=tls", *words)
    assert what in said and cure in said


def test_the_doctor_checks_what_it_can(run_folder: Path) -> None:
    process = start(run_folder, "-m", "diloco", "doctor", "--config", "run.yaml")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert "not checked, because this machine has no /proc" in output


def test_windows_is_refused_with_the_cure(tmp_path: Path) -> None:
    process = start(tmp_path, "-c", "import os; os.name = 'nt'; import diloco")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "use Linux, which Windows has in WSL 2" in output
