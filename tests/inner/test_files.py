"""Files replaced whole or not at all, and locks that end with their holder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inner.files import try_lock, try_process_lock, wait_for_lock, write_atomically

HOLD_IN_A_CHILD = """
import os, sys
from inner.files import try_lock, try_process_lock
file = open(sys.argv[1], "a")
assert {"flock": try_lock, "lockf": try_process_lock}[sys.argv[2]](file)
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def test_an_atomic_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new" / "summary.json", "one")
    write_atomically(tmp_path / "new" / "summary.json", "two \u00b5")
    assert [(p.name, p.read_bytes()) for p in (tmp_path / "new").iterdir()] == [
        ("summary.json", b"two \xc2\xb5")
    ]


def test_a_write_that_fails_names_the_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, "old")
    (tmp_path / f".a.{os.getpid()}").mkdir()
    with pytest.raises(OSError) as error:
        write_atomically(path, "new")
    assert error.value.filename is not None and path.read_text() == "old"


def test_a_lock_is_exclusive_or_shared_and_ends_with_its_file(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as first, (tmp_path / "lock").open() as second:
        assert try_lock(first)
        assert not try_lock(second) and not try_lock(second, shared=True)
        first.close()
        wait_for_lock(second)
    with (tmp_path / "lock").open() as first, (tmp_path / "lock").open() as second:
        assert try_lock(first, shared=True) and try_lock(second, shared=True)


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_a_childs_copy_of_the_file_keeps_a_flock_but_not_a_process_lock(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD_IN_A_CHILD, str(path), kind]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with path.open("a") as mine:
            take = {"flock": try_lock, "lockf": try_process_lock}[kind]
            assert not take(mine)
            holder.send_signal(signal.SIGKILL)
            holder.wait(timeout=30)
            assert take(mine) == (kind == "lockf")
            os.kill(child, signal.SIGKILL)
