"""Ctrl-C and SIGTERM end a process within seconds, even one whose main thread is blocked inside a collective."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 4.0
STOPS = (signal.SIGTERM, signal.SIGINT)


def on_stop(goodbye: Callable[[], None], others: Mapping[int, Callable[[], object]] | None = None) -> None:
    """From now on SIGTERM and SIGINT run `goodbye` in a thread, for GRACE_SECONDS at most, then end the process.

    `others`: what other signals do, by number, in a thread too; it must be short. Call it once, from the main thread.
    The exit status is 128 + the signal's number.
    """
    others = others or {}
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # The C-level handler writes to this descriptor at once; a Python handler would wait for the main thread.
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (*STOPS, *others):
        signal.signal(number, _ignore)
    threading.Thread(target=_wait_and_end, args=(read_end, goodbye, others), name="signals", daemon=True).start()


def end_with_parent() -> None:
    """Get SIGTERM when the parent process dies, however it dies (Linux; elsewhere this does nothing)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has done the work."""


def end_after(goodbye: Callable[[], None], status: int, seconds: float = GRACE_SECONDS) -> NoReturn:
    """Run `goodbye` in a thread for so long at most, then end the process; from any thread."""
    worker = threading.Thread(target=goodbye, name="goodbye", daemon=True)
    worker.start()
    worker.join(seconds)
    # Not sys.exit: other threads may be inside a collective that will never return.
    os._exit(status)


def _wait_and_end(read_end: int, goodbye: Callable[[], None], others: Mapping[int, Callable[[], object]]) -> None:
    while (number := os.read(read_end, 1)[0]) not in STOPS:
        # Python's own handlers, of signals that are not ours, write here, too.
        if number in others:
            others[number]()
    end_after(goodbye, 128 + number)
