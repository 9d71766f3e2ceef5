"""Tell the user of a command that it is alive: a line after three seconds, then every ten
seconds.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from inner.threads import start_thread

FIRST_SECONDS = 3.0
"""A command that takes longer says what it does."""
NEXT_SECONDS = 10.0
"""Time between two lines."""
LEAST_SHARE = 0.01
"""Before this share of the work is done, no time to the end is estimated."""


def _unknown() -> None:
    return None


@dataclass
class Work:
    """A piece of work that is under way."""

    what: str
    share: Callable[[], float | None] = _unknown
    """Returns which share of it is done, from 0 to 1; None if that is not known.

    Called on another thread.
    """
    began_at: float = field(default_factory=time.monotonic)

    def describe(self) -> str:
        """Return what is done, for how long, and how long it still takes."""
        seconds = time.monotonic() - self.began_at
        told = f"{self.what}: {seconds:.0f} s so far"
        share = self.share()
        if share is None or share < LEAST_SHARE:
            return told
        return f"{told}, {100 * share:.0f} % done, about {seconds / share - seconds:.0f} s to go"


_under_way: list[Work] = []
"""The work of this process, and in it the work that is a part of it; the innermost last."""


@contextmanager
def life_signs(what: str, share: Callable[[], float | None] = _unknown) -> Iterator[None]:
    """Write lines about the block's work to stderr while it lasts, the first after FIRST_SECONDS.

    Within another such block only this one's lines are written.
    """
    _under_way.append(Work(what, share))
    is_over = threading.Event()
    if len(_under_way) == 1:
        with suppress(RuntimeError):  # Without a thread there are no lines.
            start_thread(lambda: _tell(is_over), "life signs")
    try:
        yield
    finally:
        is_over.set()
        _under_way.pop()


def _tell(is_over: threading.Event) -> None:
    pause = FIRST_SECONDS
    while not is_over.wait(pause):
        with suppress(IndexError, OSError, ValueError):  # The work has ended, or stderr is closed.
            sys.stderr.write(f"{_under_way[-1].describe()}\n")
            sys.stderr.flush()
        pause = NEXT_SECONDS
