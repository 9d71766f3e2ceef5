"""What a child process has said before its end, and how a child ends with all that it has
started.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from diloco.runtime import processes
from diloco.runtime.processes import find_processes, kill, start, stop

GRANDCHILD = """
import subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
other = subprocess.Popen(sleep, start_new_session=True)
print(other.pid, flush=True)
time.sleep(600)
"""
HAS_PS = shutil.which("ps") is not None


def error_excerpt(folder: Path, text: str) -> str:
    child = start(
        "child", [sys.executable, "-S", "-c", f"print({text!r}, end='')"], folder / "log.txt"
    )
    child.process.wait(60)
    stop([child])
    return child.error_excerpt()


def test_the_excerpt_is_the_error_message_not_what_others_write_below(tmp_path) -> None:
    text = (
        "error: of a life before\nstep 1\nerror: no such device\n  use cpu\n"
        + "Traceback of another rank\n" * 30
    )
    assert error_excerpt(tmp_path, text) == "error: no such device\n  use cpu"


def test_without_an_error_they_are_the_last_lines(tmp_path) -> None:
    assert error_excerpt(tmp_path, "".join(f"{n}\n" for n in range(40))) == "\n".join(
        map(str, range(25, 40))
    )


@pytest.mark.parametrize(
    "has_proc", [True, pytest.param(False, marks=pytest.mark.skipif(not HAS_PS, reason="no ps"))]
)
def test_a_child_is_killed_with_what_it_has_started(has_proc, tmp_path, monkeypatch) -> None:
    if not has_proc:
        monkeypatch.setattr(processes, "PROC", tmp_path / "nowhere")
    log = tmp_path / "log.txt"
    child = start("child", [sys.executable, "-S", "-c", GRANDCHILD], log)
    deadline = time.monotonic() + 60
    while not log.read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.01)
    grandchild = int(log.read_text())
    assert find_processes([child]) == {child.process.pid, grandchild}
    kill([child])
    assert find_processes([child]) == set()
    while is_running(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(grandchild)


def is_running(pid: int) -> bool:
    """Whether a process runs that is not one which has ended and that nobody has waited for."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
