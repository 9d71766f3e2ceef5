"""Atomic writes of files that an island keeps: each is complete or missing, also after a kill."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_beside(path: Path) -> Iterator[Path]:
    """Yield a path in the folder of `path`, to write a whole file before a rename or a link gives
    it its name.

    The folder is created if it is missing. A file that is left at this path at the end is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
    finally:
        beside.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by one rename: a reader sees the old file or the new one. Raises OSError.

    The data is not synced: a power failure may still lose it.
    """
    with file_beside(path) as beside:
        beside.write_bytes(data)
        os.replace(beside, path)
