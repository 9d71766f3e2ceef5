"""Islands as `diloco launch` runs them, and what can be done to their processes from outside.

The launcher and its ranks are forked from the test's process, because importing torch and hivemind
takes seconds at each of many starts. The launcher's code is the shipped one in all but that: it
starts the ranks, sees them end, ends the others, and starts all of them again.
"""

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from diloco.cli.exit import error_text, exit_status
from diloco.runtime import rank_launcher
from diloco.watchdog.signals import end_with_parent
from tests.faults.leftovers import children_of, descendants_of, name_of, state_of
from tests.faults.shortages import own_shared_memory
from tests.harness import begin_fork
from tests.swarm import Rank, Swarm, enter_namespace

DAEMON = "p2pd"
"""Name of the process of a libp2p daemon."""
MAX_RESTARTS = 1000
AGAIN = re.compile(r"starting all ranks again: restart (\d+)")
KILL_SECONDS = 20.0


class ForkedRank:
    """What the launcher uses of subprocess.Popen, for a rank that it has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (KILL_SECONDS if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class LaunchedIsland:
    """A launcher with its ranks, and the island's folder. The launcher's pid names this life of the
    island.
    """

    def __init__(self, launcher: Rank, folder: Path) -> None:
        self.launcher, self.folder = launcher, folder

    @property
    def ranks(self) -> list[int]:
        """Pids of the ranks that run now, in the order of their start."""
        return [pid for pid in children_of(self.launcher.pid) if state_of(pid) not in ("Z", None)]

    @property
    def daemons(self) -> list[int]:
        """Pid of the libp2p daemon, in a list; nothing over gloo, or while it starts."""
        return [
            pid
            for pid in descendants_of(self.launcher.pid)
            if name_of(pid) == DAEMON and state_of(pid) != "Z"
        ]

    @property
    def num_restarts(self) -> int:
        """How often any launcher of this island has started its ranks again."""
        return len(AGAIN.findall(self.log))

    @property
    def log(self) -> str:
        return self.launcher.log.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """Exit code of the launcher, negative if a signal ended it; None while it runs."""
        if self.launcher.exit_code is None:
            pid, status = os.waitpid(self.launcher.pid, os.WNOHANG)
            self.launcher.exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self.launcher.exit_code

    def signal_all(self, number: int) -> None:
        """Send a signal to the launcher and all its descendants, those included that start
        meanwhile.
        """
        signalled: set[int] = set()
        while new := {self.launcher.pid, *descendants_of(self.launcher.pid)} - signalled:
            for pid in new:
                send(pid, number)
            signalled |= new

    def kill(self) -> None:
        """Kill all processes at once, as when the machine dies, and reap the launcher."""
        self.signal_all(signal.SIGSTOP)
        doomed = [*descendants_of(self.launcher.pid), self.launcher.pid]
        for pid in doomed:
            send(pid, signal.SIGKILL)
        self.launcher.wait(time.monotonic() + KILL_SECONDS)


def send(pid: int, number: int) -> None:
    """Send a signal, unless the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


Work = Callable[[], None]


def launch(made: Swarm, index: int, train: Callable[..., None]) -> LaunchedIsland:
    """Start island `index` of the swarm. Each of its ranks calls train(config, index)."""
    settings = made.config.for_island(index)
    folder = Path(settings.run_dir) / made.config.name / settings.label
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    log.touch()
    pid = os.fork()
    if pid == 0:
        _be_launcher(made, index, settings.ranks, log, partial(train, made.config, index))
    return LaunchedIsland(Rank(pid, log), folder)


def _be_launcher(made: Swarm, index: int, num_ranks: int, log: Path, work: Work) -> NoReturn:
    code = 1
    try:
        begin_fork()
        os.setsid()
        end_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pytest has replaced both with its own files.
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        if index in made.inside:
            enter_namespace(made.inside[index])
        if made.has_own_shared_memory:
            own_shared_memory()
        rank_launcher.start_rank = partial(_fork_rank, work=work)
        code = rank_launcher.launch_ranks([], num_ranks, MAX_RESTARTS)
    except BaseException:  # noqa: BLE001 - the test finds it in the log
        traceback.print_exc()
    finally:
        os._exit(code)


def _fork_rank(
    command: Sequence[str],
    rank: int,
    env: Mapping[str, str],
    descriptors: Sequence[int],
    *,
    work: Work,
) -> ForkedRank:
    """Do for a forked rank what rank_launcher.start_rank does for a program."""
    pid = os.fork()
    if pid:
        return ForkedRank(pid)
    code = 1
    try:
        begin_fork()
        os.setsid()
        end_with_parent()
        for number in (*rank_launcher.STOPS, *rank_launcher.FORWARDED):
            signal.signal(number, signal.SIG_DFL)
        os.environ |= {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001 - the launcher must learn of any error
        code = exit_status(error)
        sys.stderr.write(f"error: {text}\n") if (
            text := error_text(error)
        ) else traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def ended(islands: Mapping[int, LaunchedIsland]) -> Iterator[None]:
    """Kill at exit all of these islands that still run."""
    try:
        yield
    finally:
        for island in islands.values():
            if island.exit_code is None:
                island.kill()
