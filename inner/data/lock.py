"""A lock for work that several processes on one machine or a shared disk would otherwise repeat."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inner.errors import InputError
from inner.files import try_lock

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
KEEP_ALIVE_SECONDS = 1.0
STALLED_SECONDS = 600.0
"""Number of seconds without a sign of life from the lock's holder after which waiting ends with an
error."""

KeepAlive = Callable[[], None]


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[KeepAlive]:
    """Wait for the lock of this file and hold it. It is released at the latest when this process
    ends.

    Yields a function to call regularly while working, which shows waiting processes a sign of life.
    Raises InputError if the current holder shows none.
    """
    with path.open("a+") as file:
        _take(file.fileno(), path, what)
        yield _build_keep_alive(file.fileno())


def _take(descriptor: int, path: Path, what: str) -> None:
    alive_at = 0.0
    changed_at = time.monotonic()
    is_logged = False
    while not try_lock(descriptor):
        if not is_logged:
            log.info("another process is preparing %s: waiting for it", what)
            is_logged = True
        if os.fstat(descriptor).st_mtime != alive_at:
            alive_at = os.fstat(descriptor).st_mtime
            changed_at = time.monotonic()
        if time.monotonic() - changed_at > STALLED_SECONDS:
            raise InputError(
                f"another process is preparing {what} and has shown no sign of life for "
                f"{STALLED_SECONDS:.0f} s; "
                f"find it with `fuser {path}` and stop it, or use another island.cache_dir"
            )
        time.sleep(POLL_SECONDS)


def _build_keep_alive(descriptor: int) -> KeepAlive:
    """Return a function that shows waiting processes that work continues. Frequent calls are
    cheap.
    """
    last = 0.0

    def keep_alive() -> None:
        nonlocal last
        if time.monotonic() - last >= KEEP_ALIVE_SECONDS:
            last = time.monotonic()
            os.utime(descriptor)

    return keep_alive
