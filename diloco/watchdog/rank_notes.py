"""Notes that an island's ranks and their launcher share in memory, so that each end has its cause.

The launcher knows which rank has died of which signal; the ranks know the island's folder and what
they logged last. A note is a slot of fixed size in a file without a name, which survives the death
of a rank. Where the system has no such file, notes are not kept.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

NOTES = "DILOCO_RANK_NOTES"
"""Environment variable: the descriptor of the file in a rank."""
NAME = "diloco-notes"
SLOT_BYTES = 4096
CAUSE = 0
FOLDER = 1
FIRST_RANK = 2
"""Slots: the cause of the end of this life of the island, its folder, then the last lines of each
rank's log.
"""
LAST_LINES = 3
LINE_CHARACTERS = 300


def create_notes() -> int | None:
    """Return the descriptor of a new file of notes; None if the system has none. The caller closes
    it.
    """
    return os.memfd_create(NAME) if hasattr(os, "memfd_create") else None


def write_note(notes: int | None, slot: int, text: str) -> None:
    """Replace a note. Without a file, do nothing."""
    if notes is not None:
        with suppress(OSError):
            os.pwrite(
                notes, text.encode()[: SLOT_BYTES - 1].ljust(SLOT_BYTES, b"\0"), slot * SLOT_BYTES
            )


def read_note(notes: int | None, slot: int) -> str:
    """Return a note; empty if there is none."""
    if notes is None:
        return ""
    with suppress(OSError):
        return (
            os.pread(notes, SLOT_BYTES, slot * SLOT_BYTES)
            .partition(b"\0")[0]
            .decode(errors="replace")
        )
    return ""


def find_notes() -> int | None:
    """Return the descriptor of the notes in a rank; None in a process that no launcher of ranks has
    started.

    Descendants of a rank inherit the variable but not the file: the same number may be another file
    there.
    """
    with suppress(KeyError, ValueError, OSError):
        number = int(os.environ[NOTES])
        if f"/memfd:{NAME} " in os.readlink(f"/proc/self/fd/{number}") + " ":
            return number
    return None


def note_folder(folder: Path) -> None:
    """Tell the launcher where the island's records are. Called by its leader, which holds the
    folder's lock.
    """
    write_note(find_notes(), FOLDER, str(folder.absolute()))


def is_end_noted() -> bool:
    """Return whether the launcher ends this rank because another one has died, and records that
    itself.
    """
    return bool(read_note(find_notes(), CAUSE))


def note_error(rank: int, text: str) -> None:
    """Keep the error that ends a rank as the last of its lines."""
    notes = find_notes()
    lines = read_note(notes, FIRST_RANK + rank).splitlines()
    write_note(
        notes,
        FIRST_RANK + rank,
        "\n".join([*lines[1 - LAST_LINES :], " ".join(text.split())[:LINE_CHARACTERS]]),
    )


class LastLines(logging.Handler):
    """Keeps the last lines that a rank has logged among the notes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._notes = find_notes()
        self._slot = FIRST_RANK + rank
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self._lines = [
            *self._lines[1 - LAST_LINES :],
            " ".join(record.getMessage().split())[:LINE_CHARACTERS],
        ]
        write_note(self._notes, self._slot, "\n".join(self._lines))
