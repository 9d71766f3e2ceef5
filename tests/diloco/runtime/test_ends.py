"""The cause of an island's end: what the kernel counts, what is written, and where."""

import os
import signal
from pathlib import Path

import pytest

from diloco.records.logbook import LOGBOOK
from diloco.records.run_folder import METRICS, Tail
from diloco.runtime.ends import count_memory_kills, describe_end, record_end
from diloco.watchdog.rank_notes import (
    FIRST_RANK,
    FOLDER,
    SLOT_BYTES,
    create_notes,
    read_note,
    write_note,
)

V2 = (
    "0::/job/step\n",
    "job/step/memory.events",
    "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n",
)
V1 = (
    "9:name=systemd:/\n4:memory:/job\n0::/\n",
    "memory/job/memory.oom_control",
    "under_oom 0\noom_kill 2\n",
)
INSIDE = ("0::/\n", "memory.events", "oom 3\noom_kill 2\n")


@pytest.mark.parametrize(("groups", "name", "text"), [V2, V1, INSIDE])
def test_the_kernels_counter_of_the_own_control_group_is_read(
    tmp_path: Path, groups: str, name: str, text: str
) -> None:
    (tmp_path / "own").write_text(groups)
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    assert count_memory_kills(tmp_path / "cgroup", tmp_path / "own", tmp_path / "vmstat") == 7
    (tmp_path / "cgroup" / name).parent.mkdir(parents=True)
    (tmp_path / "cgroup" / name).write_text(text)
    assert count_memory_kills(tmp_path / "cgroup", tmp_path / "own", tmp_path / "vmstat") == 2


def test_this_system_counts_them() -> None:
    assert (count_memory_kills() or 0) >= 0


@pytest.mark.parametrize(
    ("code", "kills", "text"),
    [
        (-signal.SIGKILL, 0, "rank 1 was ended by SIGKILL"),
        (
            -signal.SIGKILL,
            1,
            "rank 1 was ended by SIGKILL, for lack of memory: the kernel ended 1 process meanwhile",
        ),
        (-signal.SIGSEGV, 1, "rank 1 was ended by SIGSEGV"),
        (1, 0, "rank 1 ended with status 1"),
    ],
)
def test_an_end_is_said_with_its_rank_signal_and_memory(code: int, kills: int, text: str) -> None:
    assert describe_end(1, code, memory_kills=kills) == text


def test_the_end_is_written_to_logbook_and_metrics_with_the_last_lines_of_that_rank(
    tmp_path: Path,
) -> None:
    notes = create_notes()
    assert notes is not None
    folder = tmp_path / "run" / "island-1"
    folder.mkdir(parents=True)
    write_note(notes, FOLDER, str(folder))
    write_note(notes, FIRST_RANK + 1, "round 3 attempt 0\nround 4 attempt 0")
    record_end(notes, 1, "rank 1 was ended by SIGKILL")
    os.close(notes)
    (event,) = Tail(folder / METRICS).new_records()
    told = "rank 1 was ended by SIGKILL; its log ended with: round 3 attempt 0 | round 4 attempt 0"
    assert (event.name, event.text) == ("died", told)
    assert f"**island-1** died: {told}" in (tmp_path / "run" / LOGBOOK).read_text()


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notes = create_notes()
    record_end(notes, 0, "rank 0 ended with status 1")
    record_end(None, 0, "rank 0 ended with status 1")
    assert list(tmp_path.iterdir()) == []


def test_a_note_is_cut_to_its_slot() -> None:
    notes = create_notes()
    write_note(notes, FOLDER, "x" * (2 * SLOT_BYTES))
    write_note(notes, FOLDER + 1, "next")
    assert (len(read_note(notes, FOLDER)), read_note(notes, FOLDER + 1)) == (SLOT_BYTES - 1, "next")
