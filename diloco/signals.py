"""Ctrl-C and SIGTERM end a process within seconds, even one whose main thread is blocked inside a collective."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 4.0


def on_stop(goodbye: Callable[[], None]) -> None:
    """From now on SIGTERM and SIGINT run `goodbye` in a thread, for GRACE_SECONDS at most, then end the process.

    Call it once, from the main thread. The exit status is 128 + the signal's number.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # The C-level handler writes to this descriptor at once; a Python handler would wait for the main thread.
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    threading.Thread(target=_wait_and_end, args=(read_end, goodbye), name="signals", daemon=True).start()


def end_with_parent() -> None:
    """Get SIGTERM when the parent process dies, however it dies (Linux; elsewhere this does nothing)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has done the work."""


def _wait_and_end(read_end: int, goodbye: Callable[[], None]) -> None:
    number = os.read(read_end, 1)[0]
    worker = threading.Thread(target=goodbye, name="goodbye", daemon=True)
    worker.start()
    worker.join(GRACE_SECONDS)
    # Not sys.exit: other threads may be inside a collective that will never return.
    os._exit(128 + number)
