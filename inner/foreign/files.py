"""Files from other people: opened without waiting for a writer, and measured before they are
read.
"""

import errno
import os
import stat
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO

from inner.errors import InputError

MAX_DOCUMENT_BYTES = 1 << 30
"""Size limit of a file that is read whole, of a member of an archive, and of a line. Longer input
is not a document."""
CHUNK_BYTES = 1 << 20


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError, also for a FIFO or a device, because reading
    these may never end.
    """
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file but a FIFO or a device", str(path))
    return file


def read_file(path: Path, most_bytes: int, cure: str = "copy it again") -> bytes:
    """Return the content of a regular file. Raises OSError, and InputError with the cure if it is
    longer than `most_bytes`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise InputError(
                f"{path}: has {size} bytes, but at most {most_bytes} are allowed; {cure}"
            )
        return file.read(size)


def read_at_most(stream: IO[bytes], most_bytes: int) -> bytes:
    """Return the content of a stream, or its first `most_bytes` bytes. It takes memory only for the
    bytes that exist.
    """
    chunks = []
    while most_bytes and (chunk := stream.read(min(most_bytes, CHUNK_BYTES))):
        chunks.append(chunk)
        most_bytes -= len(chunk)
    return b"".join(chunks)


def lines_of(stream: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a stream. A line longer than `most_bytes` comes in pieces, the first of
    `most_bytes` + 1 bytes.
    """
    return iter(partial(stream.readline, most_bytes + 1), b"")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
