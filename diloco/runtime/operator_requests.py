"""The operator's requests to a running island: files in its folder, signals, and a time limit.

    ISLAND_DIR/save-now             save a checkpoint and continue
    ISLAND_DIR/stop-after-round     leave after the current round, or after as many rounds as the
                                    number in the file
    RUN_DIR/...                     the same for all islands of the run on this machine; they all
                                    stop after the same round, the one after the current round
    SIGUSR1, SIGUSR2 to any rank    the same as creating the first or the second file

The island removes a file when it accepts the request.
"""

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diloco.records.best_effort import best_effort
from inner.files import try_lock, wait_for_lock, write_atomically
from outer.space.ranks import RankGroup

log = logging.getLogger(__name__)

SAVE = "save-now"
STOP = "stop-after-round"
SIGNALS = {signal.SIGUSR1: SAVE, signal.SIGUSR2: STOP}
LISTENER = "listens"
"""A file in the island's folder that is locked while the island accepts requests there."""
STARTED = "started"
"""A file in the island's folder with its start time in unix seconds. Restarts of its ranks do not
change it.
"""
ROUNDS_REMEMBERED = 4
WRITE_SECONDS = 0.2
"""`echo 9 > stop-after-round` makes an empty file first: so long the number is waited for."""
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class OperatorRequest:
    """The operator's request at present."""

    save: bool = False
    """Whether a checkpoint is requested. It stays True until `OperatorRequests.mark_saved` is
    called."""
    stop: str = ""
    """The reason to leave now; empty to continue."""


class OperatorRequests:
    """Polls the operator's requests on one rank. Only the leader reads the files and the clock."""

    def __init__(
        self, ranks: RankGroup, folder: Path, max_hours: float | None, started_at: float
    ) -> None:
        """Create the object on one rank. `started_at`: start of this process in unix seconds."""
        self._ranks = ranks
        self._folder = folder
        self._max_hours = max_hours
        self._is_save_wanted = False
        self._stop_after: int | None = None
        self._clock = RunClock(folder, started_at) if ranks.is_leader else None
        self._lock = lock_listener(folder) if ranks.is_leader else None

    def poll(self, rounds_done: int) -> OperatorRequest:
        """Return the current request, which is the same on every rank. All ranks must call it
        together.

        `rounds_done`: number of rounds of the run that are done, including the round in flight.
        """
        return self._ranks.on_leader(lambda: self._poll_files(rounds_done))

    def mark_saved(self) -> None:
        """Clear the request to save."""
        self._is_save_wanted = False

    def close(self) -> None:
        """Stop accepting requests. Further calls do nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _poll_files(self, rounds_done: int) -> OperatorRequest:
        assert self._clock is not None, "only the leader polls"
        forward_request(self._folder.parent, SAVE, "")
        forward_request(self._folder.parent, STOP, str(rounds_done + 1))
        self._is_save_wanted |= consume_request(self._folder / SAVE) is not None
        if (text := consume_request(self._folder / STOP)) is not None:
            self._stop_after = int(text) if text.isdecimal() else rounds_done
        self._clock.observe(rounds_done)
        stop = ""
        if self._stop_after is not None and rounds_done >= self._stop_after:
            stop = f"asked to stop after {self._stop_after} rounds"
        elif self._max_hours is not None and self._clock.would_exceed(self._max_hours * 3600):
            stop = f"another round does not fit into island.max_hours={self._max_hours:g}"
        return OperatorRequest(self._is_save_wanted, stop)


class RunClock:
    """Measures how long the island has been running, including restarts of its ranks, and how long
    its rounds take.
    """

    def __init__(
        self, folder: Path, started_at: float, now: Callable[[], float] = time.time
    ) -> None:
        self._now = now
        self._started_at = load_start_time(folder, started_at)
        self._round: int | None = None
        self._round_began_at = now()
        self._rounds: deque[float] = deque(maxlen=ROUNDS_REMEMBERED)

    def observe(self, rounds_done: int) -> None:
        """Record the time at which `rounds_done` rounds are done."""
        if rounds_done == self._round:
            return
        now = self._now()
        if self._round is not None:
            self._rounds.append(now - self._round_began_at)
        self._round = rounds_done
        self._round_began_at = now

    def would_exceed(self, limit_seconds: float) -> bool:
        """Return whether another round, as long as the longest recent one, would end after the
        limit.
        """
        return self._now() - self._started_at + max(self._rounds, default=0.0) > limit_seconds


def make_request(folder: Path, name: str) -> None:
    """Request `name` (SAVE or STOP) from the island in `folder`. Any rank may call it; a failure is
    logged.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError as error:
        log.warning("cannot make the request %s: %s", folder / name, error)


def consume_request(path: Path) -> str | None:
    """Remove a request file and return its text; None if there is no such file."""
    try:
        text = read_request(path)
        path.unlink()
        return text
    except FileNotFoundError:
        pass
    except OSError as error:
        # A problem of the file system must not end the training.
        log.warning("cannot accept the request %s: %s", path, error)
    return None


def read_request(path: Path) -> str:
    """Return the text of a request file. If it is empty, its writer may not have written yet, so
    it is read again for WRITE_SECONDS.
    """
    deadline = time.monotonic() + WRITE_SECONDS
    while not (text := path.read_text(errors="replace").strip()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return text


def forward_request(run_dir: Path, name: str, text: str) -> None:
    """Copy a request in the run's folder to each island that runs here. `text` replaces an empty
    request's text.
    """
    try:
        # Only one of several islands succeeds in renaming the file.
        claimed = (run_dir / name).rename(run_dir / f".{name}.{os.getpid()}")
    except OSError:
        return
    text = consume_request(claimed) or text
    for lock in run_dir.glob(f"*/{LISTENER}"):
        if is_listening(lock):
            try:
                # The island must not find the file while it is empty: it would leave at once.
                write_atomically(lock.parent / name, text)
            except OSError as error:
                log.warning("cannot forward the request %s: %s", lock.parent / name, error)


def lock_listener(folder: Path) -> int | None:
    """Announce that an island accepts requests in `folder`, until the returned file descriptor is
    closed.

    If the file cannot be written, return None and log a warning: the island then takes requests
    from its own folder only.
    """
    with best_effort(f"{folder / LISTENER}: requests in the run's folder do not reach this island"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LISTENER, os.O_CREAT | os.O_RDWR, 0o644)
        # This cannot block for long: the island has locked its own folder, so only `is_listening`
        # can hold the lock, briefly.
        wait_for_lock(lock)
        return lock
    return None


def is_listening(path: Path) -> bool:
    """Return whether the process that locked this file with `lock_listener` is still running."""
    with path.open() as file:
        return not try_lock(file, shared=True)


def load_start_time(folder: Path, started_at: float) -> float:
    """Return the island's start time in unix seconds. It is saved at the first start, so restarts
    do not change it.
    """
    path = folder / STARTED
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        try:
            return float(path.read_text())
        except (OSError, ValueError):
            log.warning(
                "%s does not say when this island was started: island.max_hours counts from now",
                path,
            )
    with best_effort(
        f"{path} was not written: after a restart island.max_hours starts from zero again"
    ):
        write_atomically(path, repr(started_at))
    return started_at
