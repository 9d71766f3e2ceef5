"""Reads the whole lines of a file that still grows, within a limit for a line that does not end."""

from pathlib import Path

PIECE_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 20
"""What is longer and has no end is no line of ours: it is passed over, not read again and again."""


class GrowingFile:
    """A file of lines that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0
        self._is_in_long_line = False
        """The byte at the offset belongs to a line that is passed over."""

    def new_lines(self) -> list[bytes]:
        """The lines that were completed since the last call. Raises OSError."""
        lines: list[bytes] = []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(PIECE_BYTES):
                if end := data.rfind(b"\n") + 1:
                    lines += data[:end].split(b"\n")[self._is_in_long_line : -1]
                    self._is_in_long_line = False
                elif len(data) >= MAX_LINE_BYTES or self._is_in_long_line:
                    end, self._is_in_long_line = len(data), True
                else:
                    break  # The rest of the line is still to come.
                self._offset = file.seek(self._offset + end)
        return lines
