"""Signal handlers that end a process within seconds, even if its main thread is blocked inside a
collective.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from inner.threads import start_thread

MARK = "DILOCO_CHILD"
"""An environment variable that marks a child and all its descendants.

Sessions and parents do not identify them: ranks are started in sessions of their own, and the
children of a killed rank have no parent.
"""
PR_SET_PDEATHSIG = 1
PARENT_SECONDS = 1.0
"""How often a process checks that its parent lives, if the kernel does not report a death."""
GRACE_SECONDS = 4.0
STOPS = (signal.SIGTERM, signal.SIGINT)


def on_stop(
    cleanup: Callable[[], None], others: Mapping[int, Callable[[], object]] | None = None
) -> None:
    """Make SIGTERM and SIGINT run `cleanup` in a thread and then end the process.

    The cleanup may take GRACE_SECONDS. `others` has short handlers of other signals, by number,
    which also run in a thread. The exit status is 128 + the signal's number. Call it once, from the
    main thread.
    """
    others = others or {}
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # The C-level handler writes to this descriptor at once, whereas a Python handler waits for the
    # main thread.
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (*STOPS, *others):
        # The thread that reads the other end of the pipe handles the signal.
        signal.signal(number, lambda *_: None)
    threading.Thread(
        target=_wait_and_end, args=(read_end, cleanup, others), name="signals", daemon=True
    ).start()


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent dies in any way.

    On Linux only; elsewhere `watch_parent` replaces it.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def watch_parent() -> None:
    """Send SIGTERM to this process when its parent dies, if the kernel cannot do so.

    It does nothing unless one of our own processes has started this one.
    """
    if MARK in os.environ and not hasattr(ctypes.CDLL(None), "prctl"):
        parent = os.getppid()
        threading.Thread(
            target=_wait_for_parent, args=(parent,), name="parent", daemon=True
        ).start()


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def end_after(cleanup: Callable[[], None], status: int, seconds: float = GRACE_SECONDS) -> NoReturn:
    """Run `cleanup` in a thread for at most `seconds`, then end the process. May be called from any
    thread.
    """
    # Without memory for a thread there is no cleanup, but the process must end all the same.
    with suppress(RuntimeError, MemoryError):
        start_thread(cleanup, "cleanup", seconds).wait(seconds)
    # sys.exit would wait for other threads, which may be inside a collective that never returns.
    os._exit(status)


def _wait_and_end(
    read_end: int, cleanup: Callable[[], None], others: Mapping[int, Callable[[], object]]
) -> None:
    while (number := os.read(read_end, 1)[0]) not in STOPS:
        # Other signals that have a Python handler are written to the pipe, too.
        if number in others:
            others[number]()
    end_after(cleanup, 128 + number)
