"""What the operator wants of a running island: files in its folder, signals, a limit of time.

    ISLAND_DIR/save-now             save a checkpoint and go on
    ISLAND_DIR/stop-after-round     leave after the round going on; with a number in it, when so many rounds are done
    RUN_DIR/...                     the same for all islands of the run that this machine runs: those that stop do so
                                    after the same round, the one after the round going on
    SIGUSR1, SIGUSR2 to any rank    as if the first or the second file had been made

A file is removed when its wish has been taken up.
"""

import fcntl
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outer.team import Team

log = logging.getLogger(__name__)

SAVE, STOP = "save-now", "stop-after-round"
SIGNALS = {signal.SIGUSR1: SAVE, signal.SIGUSR2: STOP}
LISTENS = "listens"
"""In an island's folder: locked as long as somebody takes up wishes there."""
STARTED = "started"
"""In an island's folder: when its processes were started, not counting torchrun's restarts; unix seconds."""
ROUNDS_REMEMBERED = 4


@dataclass(frozen=True)
class Wish:
    """`save`: since when it was asked for until `Wishes.saved`. `stop`: why to leave now, "" for going on."""

    save: bool = False
    stop: str = ""


class Wishes:
    """Of one rank; the leader alone looks at files and the clock."""

    def __init__(self, team: Team, folder: Path, max_hours: float | None, started_at: float) -> None:
        """`started_at`: of this process, unix seconds."""
        self._team, self._folder, self._max_hours = team, folder, max_hours
        self._is_save_wanted = False
        self._stop_after: int | None = None
        self._clock = Clock(folder, started_at) if team.is_leader else None
        self._lock = listen(folder) if team.is_leader else None

    def next(self, rounds_done: int) -> Wish:
        """What is wanted when so many rounds of the run are done, or will be with the one on its way.

        The same on every rank; every rank must call it at the same place.
        """
        return self._team.on_leader(lambda: self._look(rounds_done))

    def saved(self) -> None:
        """The wish to save has been fulfilled."""
        self._is_save_wanted = False

    def close(self) -> None:
        """Take up no more wishes. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _look(self, rounds_done: int) -> Wish:
        assert self._clock is not None, "the leader looks"
        share(self._folder.parent, SAVE, "")
        share(self._folder.parent, STOP, str(rounds_done + 1))
        self._is_save_wanted |= take(self._folder / SAVE) is not None
        text = take(self._folder / STOP)
        if text is not None:
            self._stop_after = int(text) if text.isdecimal() else rounds_done
        self._clock.observe(rounds_done)
        stop = ""
        if self._stop_after is not None and rounds_done >= self._stop_after:
            stop = f"asked to stop after {self._stop_after} rounds"
        elif self._max_hours is not None and self._clock.is_short(self._max_hours * 3600):
            stop = f"another round does not fit into island.max_hours={self._max_hours:g}"
        return Wish(self._is_save_wanted, stop)


class Clock:
    """How long the island has been running, torchrun's restarts included, and how long its rounds take."""

    def __init__(self, folder: Path, started_at: float, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._started_at = first_start(folder, started_at)
        self._round: int | None = None
        self._round_began_at = now()
        self._rounds: deque[float] = deque(maxlen=ROUNDS_REMEMBERED)

    def observe(self, rounds_done: int) -> None:
        """So many rounds are done now."""
        if rounds_done == self._round:
            return
        now = self._now()
        if self._round is not None:
            self._rounds.append(now - self._round_began_at)
        self._round, self._round_began_at = rounds_done, now

    def is_short(self, limit_seconds: float) -> bool:
        """Whether a round as long as the longest of the last ones would end after the limit."""
        return self._now() - self._started_at + max(self._rounds, default=0.0) > limit_seconds


def ask(folder: Path, name: str) -> None:
    """Make the wish of this name to the island in `folder`; on any of its ranks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError as error:
        log.warning("cannot make the wish %s: %s", folder / name, error)


def take(path: Path) -> str | None:
    """What the wish's file says, and the file is gone; None when there is none."""
    try:
        text = path.read_text(errors="replace").strip()
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        # What ails a file system must not end the training.
        log.warning("cannot take up the wish %s: %s", path, error)
        return None
    return text


def share(run_dir: Path, name: str, text: str) -> None:
    """Pass a wish to the whole run on to each island that runs here, with `text` where the operator wrote none."""
    claimed = run_dir / f".{name}.{os.getpid()}"
    try:
        # One of several islands succeeds.
        os.rename(run_dir / name, claimed)
    except OSError:
        return
    text = take(claimed) or text
    for lock in run_dir.glob(f"*/{LISTENS}"):
        if is_listening(lock):
            try:
                (lock.parent / name).write_text(text)
            except OSError as error:
                log.warning("cannot pass on the wish %s: %s", lock.parent / name, error)


def listen(folder: Path) -> int:
    """Show that wishes are taken up in this folder, until the file descriptor is closed or the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LISTENS, os.O_CREAT | os.O_RDWR, 0o644)
    # Nobody else keeps it: the island holds its folder, and whoever asks lets go at once.
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def is_listening(path: Path) -> bool:
    """Whether the process that has made this file with `listen` lives."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def first_start(folder: Path, started_at: float) -> float:
    """When this island was started by hand or by a cluster, unix seconds: torchrun's restarts go on with that time."""
    path = folder / STARTED
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        try:
            return float(path.read_text())
        except (OSError, ValueError):
            log.warning("%s does not say when this island was started: island.max_hours counts from now", path)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(repr(started_at))
    return started_at
