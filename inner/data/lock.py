"""One process at a time, of those that would do the same work on one machine or one shared disk."""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inner.errors import InputError

log = logging.getLogger(__name__)

ASK_SECONDS = 0.2
BEAT_SECONDS = 1.0
STALLED_SECONDS = 600.0
"""A holder that has not shown life for so long is not waited for."""

Beat = Callable[[], None]


@contextmanager
def held(path: Path, what: str) -> Iterator[Beat]:
    """The lock of this file, waited for; it ends with this process at the latest. Call what it gives while working.

    InputError: the process that holds it shows no life.
    """
    with path.open("a+") as file:
        _take(file.fileno(), path, what)
        yield _beat(file.fileno())


def _take(descriptor: int, path: Path, what: str) -> None:
    beaten_at, changed_at, is_said = 0.0, time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if not is_said:
            log.info("another process is at %s: waiting for it", what)
            is_said = True
        if os.fstat(descriptor).st_mtime != beaten_at:
            beaten_at, changed_at = os.fstat(descriptor).st_mtime, time.monotonic()
        if time.monotonic() - changed_at > STALLED_SECONDS:
            raise InputError(
                f"another process is at {what} and has shown no life for {STALLED_SECONDS:.0f} s: `fuser {path}` says "
                "which; end it, or use another island.cache_dir"
            )
        time.sleep(ASK_SECONDS)


def _beat(descriptor: int) -> Beat:
    """Shows those who wait that work goes on; it may be called as often as one likes."""
    last = 0.0

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= BEAT_SECONDS:
            last = time.monotonic()
            os.utime(descriptor)

    return beat
