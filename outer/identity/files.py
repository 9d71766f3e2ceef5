"""Files that an island keeps: each is there whole or not at all, also after a kill."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_beside(path: Path) -> Iterator[Path]:
    """A path in the folder of `path`, to write a file whole before it gets its name by a rename or a link.

    The folder is made if it is missing. What is left at the end is removed.
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
