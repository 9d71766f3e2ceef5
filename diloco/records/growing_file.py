"""Reads the complete lines of a growing file, and skips a line that exceeds a limit."""

import os
from pathlib import Path

PIECE_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 20
"""Longest line that is read. A longer one is not ours, and is skipped."""


class GrowingFile:
    """A file of lines that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._is_in_long_line = False
        """Whether the byte at the offset belongs to a line that is being skipped."""

    def new_lines(self) -> list[bytes]:
        """Return the lines that were completed since the last call. Raises OSError."""
        lines: list[bytes] = []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(PIECE_BYTES):
                if end := data.rfind(b"\n") + 1:
                    lines += data[:end].split(b"\n")[self._is_in_long_line : -1]
                    self._is_in_long_line = False
                elif len(data) >= MAX_LINE_BYTES or self._is_in_long_line:
                    end = len(data)
                    self._is_in_long_line = True
                else:
                    break  # The rest of the line is still to come.
                self._offset = file.seek(self._offset + end)
        return lines


def ends_inside_a_line(path: Path) -> bool:
    """Return whether the last line is incomplete, because an earlier process was killed."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return size > 0 and file.read(1) != b"\n"
