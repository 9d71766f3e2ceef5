"""What happens to files on disks."""

import os
from pathlib import Path


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 7)


def flip(file: Path) -> None:
    """Another value of one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
