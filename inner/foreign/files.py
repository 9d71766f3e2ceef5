"""Files that somebody else has made: opened without waiting for a writer, and measured before they are read."""

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
"""The limit of a file that is read whole, of a member of an archive, and of a line. What is longer is no document."""
CHUNK_BYTES = 1 << 20


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError, also for a FIFO or a device, whose reading may never end."""
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file but a FIFO or a device", str(path))
    return file


def read_file(path: Path, most_bytes: int, cure: str = "copy it again") -> bytes:
    """The content of a regular file. Raises OSError, and InputError with the cure if it has more than `most_bytes`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise InputError(f"{path}: has {size} bytes, and at most {most_bytes} are read; {cure}")
        return file.read(size)


def read_at_most(stream: IO[bytes], most_bytes: int) -> bytes:
    """All that a stream has, or its first `most_bytes`. It takes memory for what is there, not for what may be."""
    chunks = []
    while most_bytes and (chunk := stream.read(min(most_bytes, CHUNK_BYTES))):
        chunks.append(chunk)
        most_bytes -= len(chunk)
    return b"".join(chunks)


def lines_of(stream: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    """The lines of a stream. A longer one comes in pieces, of which the first has `most_bytes` + 1 bytes."""
    return iter(partial(stream.readline, most_bytes + 1), b"")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
