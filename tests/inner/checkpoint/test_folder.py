"""Checkpoints on disk survive kills, full and read-only disks, and two writers: the last good one
is kept.
"""

import os
import re
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inner.checkpoint.folder import lock_folder
from inner.checkpoint.save_load import Checkpoints
from tests.harness import RankFailed, run_ranks
from tests.inner.checkpoint_crash import (
    FILES,
    KILLED_AT_BYTES,
    KILLS,
    WEIGHT_BYTES,
    error_of,
    killed_on_a_rank,
    names_in,
    open_checkpoints,
    recovered_on_a_rank,
    save_steps,
    step_and_values,
    with_checkpoints,
)

OLD, NEW = "step-00000001", "step-00000002"
WHOLE = sorted([*FILES, "manifest.json"])

# By point of the kill: the files left on the disk, and the step that is found.
LEFT_BEHIND: dict[str, tuple[dict[str, list[str]], int]] = {
    "before_the_copy": ({OLD: WHOLE}, 1),
    "while_writing": ({OLD: WHOLE, f"{NEW}.partial": ["rank-0.tensors", "rank-1.tensors"]}, 1),
    "before_the_manifest": ({OLD: WHOLE, f"{NEW}.partial": FILES}, 1),
    "before_the_rename": ({OLD: WHOLE, f"{NEW}.partial": WHOLE}, 1),
    "after_the_rename": ({OLD: WHOLE, NEW: WHOLE}, 2),
    "while_deleting": ({f"{OLD}.deleted": WHOLE, NEW: WHOLE}, 2),
}


@pytest.mark.parametrize("point", KILLS)
def test_kill_never_loses_the_last_good_checkpoint(tmp_path: Path, point: str) -> None:
    with pytest.raises(RankFailed):
        run_ranks(killed_on_a_rank, 2, tmp_path, point)
    left = {path.name: names_in(path) for path in tmp_path.iterdir() if path.is_dir()}
    expected, step = LEFT_BEHIND[point]
    if point == "while_writing":
        assert (
            (tmp_path / f"{NEW}.partial" / "rank-0.tensors").stat().st_size
            == KILLED_AT_BYTES
            < WEIGHT_BYTES
        )
        # Whether rank 1 had begun to write is not determined.
        left[f"{NEW}.partial"] = sorted({*left[f"{NEW}.partial"], "rank-1.tensors"})
    if point == "while_deleting":
        # Two of its files are gone; which ones depends on the file system.
        assert len(left[f"{OLD}.deleted"]) == len(WHOLE) - 2
        left[f"{OLD}.deleted"] = WHOLE
    assert left == expected

    for rank in run_ranks(recovered_on_a_rank, 2, tmp_path):
        assert rank["found"] == (step, {float(step)})
        assert rank["warnings"] == []
        assert rank["then"] == (3, {3.0})
        assert rank["names"] == ["lock", "step-00000003"]


def test_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(with_checkpoints, 2, tmp_path / "new" / "folder", newest_of_none) == [
        None,
        None,
    ]


def newest_of_none(rank: int, checkpoints: Checkpoints, folder: Path) -> Any:
    assert "no checkpoint of step 7; there are: none" in error_of(lambda: checkpoints.at(7))
    return checkpoints.newest()


def test_folder_of_another_process_is_refused(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        errors = run_ranks(opened_on_a_rank, 2, tmp_path)
    for error in errors:
        assert f"pid {os.getpid()} on {socket.gethostname()}" in error
    # The lock is released although its file still exists. A kill releases it too, see above.
    assert run_ranks(with_checkpoints, 1, tmp_path, newest_of_none) == [None]


def opened_on_a_rank(rank: int, folder: Path) -> str:
    return error_of(lambda: open_checkpoints(folder))


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error in run_ranks(opened_on_a_rank, 2, tmp_path / "file" / "folder"):
        assert error.startswith("InputError")
        assert "Not a directory" in error


def test_save_that_fails_on_one_rank_fails_on_all_and_changes_nothing(tmp_path: Path) -> None:
    for error, step, names in run_ranks(with_checkpoints, 2, tmp_path, fail_on_rank_1):
        assert error.startswith("CheckpointFailed")
        assert re.search(r"step 2 was not saved: .* on rank 1; \d+ bytes are free", error)
        assert step == 1
        assert names == ["lock", "step-00000001", "step-00000003"]


def fail_on_rank_1(
    rank: int, checkpoints: Checkpoints, folder: Path
) -> tuple[str, int | None, list[str]]:
    save_steps(checkpoints, 1)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (KILLED_AT_BYTES, resource.RLIM_INFINITY))
    error = error_of(lambda: save_steps(checkpoints, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    step, _ = step_and_values(checkpoints)
    save_steps(checkpoints, 3)
    return error, step, names_in(folder)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory, or mounts it anew, with such options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True
        )
        if done.returncode:
            pytest.skip(f"needs the right to mount a file system: {done.stderr.decode().strip()}")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


def test_full_disk_is_an_error_before_anything_is_written(disk) -> None:
    # Room for one checkpoint, not for two.
    folder = disk("size=80k")
    for error, step, names in run_ranks(with_checkpoints, 2, folder, save_twice):
        assert error.startswith("InputError")
        assert "the disk is full: a checkpoint needs about 49152 bytes" in error
        assert step == 1
        assert names == ["lock", "step-00000001"]


def test_disk_that_fills_up_while_saving_keeps_the_old_one(disk) -> None:
    # 9 inodes are free and a checkpoint takes 5, so a second one does not fit.
    folder = disk("size=10m,nr_inodes=10")
    for error, step, _ in run_ranks(with_checkpoints, 2, folder, save_twice):
        assert error.startswith("CheckpointFailed")
        assert "No space left on device" in error
        assert step == 1
    disk("remount,size=10m,nr_inodes=100")
    assert run_ranks(recovered_on_a_rank, 2, folder)[0]["names"] == ["lock", "step-00000003"]


def save_twice(
    rank: int, checkpoints: Checkpoints, folder: Path
) -> tuple[str, int | None, list[str]]:
    save_steps(checkpoints, 1)
    error = error_of(lambda: save_steps(checkpoints, 2))
    return error, step_and_values(checkpoints)[0], names_in(folder)


def test_read_only_disk_is_refused(disk) -> None:
    disk("size=1m")
    folder = disk("remount,ro")
    for error in run_ranks(opened_on_a_rank, 2, folder):
        assert error.startswith("InputError")
        assert "Read-only file system" in error


def test_folder_that_may_no_longer_be_written_is_an_error_and_can_be_read(tmp_path: Path) -> None:
    for error, step in run_ranks(with_checkpoints, 2, tmp_path, save_forbidden):
        assert error.startswith("InputError")
        assert "Permission denied" in error
        assert step == 1


def save_forbidden(rank: int, checkpoints: Checkpoints, folder: Path) -> tuple[str, int | None]:
    save_steps(checkpoints, 1)
    if rank == 0:
        folder.chmod(0o555)
        if os.geteuid() == 0:
            # Root may write to a read-only folder.
            os.seteuid(65534)
    error = error_of(lambda: save_steps(checkpoints, 2))
    os.seteuid(os.getuid())
    return error, step_and_values(checkpoints)[0]
