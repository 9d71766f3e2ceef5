"""Start all ranks of an island of one node, and start them again when one dies.

    python -m diloco.runtime.rank_launcher RANKS MAX_RESTARTS MODULE ARGUMENT...

For one node it replaces torchrun and torchrun's store, which listens on all addresses of the
machine and unpickles data that anybody may send. Here the ranks connect through a file in memory
that no other process can open. Every rank runs `python -m MODULE ARGUMENT...` with torchrun's
variables RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and TORCHELASTIC_RESTART_COUNT. Importing
this does not import torch.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

from diloco.errors import FINAL_STATUS
from diloco.runtime.ends import count_memory_kills, describe_end, record_end
from diloco.watchdog.rank_notes import CAUSE, NOTES, create_notes, write_note
from diloco.watchdog.signals import MARK, end_with_parent, watch_parent

STORE = "DILOCO_RANK_STORE"
"""Environment variable: path of the FileStore through which the ranks of one life of the island
connect."""
POLL_SECONDS = 0.1
STOP_SECONDS = 6.0
"""Time for ranks to announce that they leave (diloco.watchdog.signals.GRACE_SECONDS) and to end. It
is shorter than processes.TERMINATE_SECONDS."""
STOPS = (signal.SIGTERM, signal.SIGINT)
HUNG = 85
"""Exit status of a rank that its watchdog has ended (diloco/watchdog/watchdog.py, which imports
torch).
"""
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
ENDED_FOR_GOOD = (FINAL_STATUS, *(128 + number for number in STOPS))
"""Exit statuses of a rank after which the island is not started again: a refusal, or a request to
leave."""
RECORDED = (*ENDED_FOR_GOOD, HUNG)
"""Exit statuses of a rank that has recorded its end itself."""
Rank = subprocess.Popen[bytes]


def launch_ranks(command: Sequence[str], num_ranks: int, max_restarts: int) -> int:
    """Run `command` on every rank until all end with status 0. After a failure start all again, at
    most `max_restarts` times.

    Return 0, the status of the failed rank (128 + the signal's number if a signal ended it), or 128
    + the number of the SIGTERM or SIGINT that ended this process. Must be called from the main
    thread.
    """
    received: list[int] = []
    for number in (*STOPS, *FORWARDED):
        signal.signal(number, lambda number, _: received.append(number))
    life = 0
    status = run_life(command, num_ranks, 0, received)
    while status not in (0, *ENDED_FOR_GOOD) and life < max_restarts:
        life += 1
        say(f"starting all ranks again: restart {life} of {max_restarts}")
        status = run_life(command, num_ranks, life, received)
    return status


def run_life(command: Sequence[str], num_ranks: int, life: int, received: list[int]) -> int:
    """Start all ranks and wait until all have ended. Return their common exit status. `life` counts
    starts from 0.
    """
    with open_store() as (path, descriptors), open_notes() as end:
        shared = {
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "TORCHELASTIC_RESTART_COUNT": life,
        }
        env = os.environ | {name: str(value) for name, value in shared.items()} | {STORE: path}
        # Otherwise each rank would compute with as many threads as the machine has cores.
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault(MARK, str(os.getpid()))
        if end.notes is not None:
            env[NOTES] = str(end.notes)
            descriptors = (*descriptors, end.notes)
        ranks = [start_rank(command, rank, env, descriptors) for rank in range(num_ranks)]
        try:
            return wait_for_ranks(ranks, received, on_failure=end.note)
        finally:
            end_ranks(ranks)
            end.record()


class EndOfLife:
    """How this life of the island ends, for its records."""

    def __init__(self, notes: int | None) -> None:
        self.notes = notes
        self._memory_kills = count_memory_kills()
        self._rank = 0
        self._text = ""

    def note(self, rank: int, code: int) -> None:
        """Note that a rank has failed, before the other ranks are ended. They then record no end of
        their own.
        """
        if code in RECORDED:
            return
        kills = count_memory_kills()
        more = (
            kills - self._memory_kills
            if kills is not None and self._memory_kills is not None
            else 0
        )
        self._rank = rank
        self._text = describe_end(rank, code, memory_kills=more)
        write_note(self.notes, CAUSE, self._text)

    def record(self) -> None:
        """Write the end into the island's records, after all ranks have ended."""
        if self._text:
            try:
                record_end(self.notes, self._rank, self._text)
            except Exception as error:  # noqa: BLE001 - no error of a record may keep the island from starting again
                say(f"the end is not in the island's records ({error})")


@contextmanager
def open_notes() -> Iterator[EndOfLife]:
    """Yield the end of a life, with a file of notes for its ranks."""
    notes = create_notes()
    try:
        yield EndOfLife(notes)
    finally:
        if notes is not None:
            os.close(notes)


@contextmanager
def open_store() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield a path at which every rank finds the same empty file, and the descriptors that the
    ranks must inherit.
    """
    if hasattr(os, "memfd_create"):
        # No other user can open the file, and nothing of it is left, even if all processes are
        # killed.
        file = os.memfd_create("ranks")
        try:
            yield f"/proc/self/fd/{file}", (file,)
        finally:
            os.close(file)
    else:
        with TemporaryDirectory(prefix="diloco-ranks-") as folder:
            yield f"{folder}/store", ()


def start_rank(
    command: Sequence[str], rank: int, env: Mapping[str, str], descriptors: Sequence[int]
) -> Rank:
    """Start one rank in a separate session, so that Ctrl-C reaches it only through this process."""
    return subprocess.Popen(
        command,
        env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        pass_fds=descriptors,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def wait_for_ranks(
    ranks: Sequence[Rank],
    received: list[int],
    noun: str = "rank",
    on_failure: Callable[[int, int], None] = lambda rank, code: None,
) -> int:
    """Wait until all ranks have ended with status 0, one has failed, or SIGTERM or SIGINT has come.
    Ends no rank.

    `noun`: what messages call a rank. `on_failure` is called with the rank that failed first and
    its Popen.returncode.
    """
    while True:
        while received:
            number = received.pop(0)
            if number in STOPS:
                return 128 + number
            signal_ranks(ranks, number)
        statuses = [rank.poll() for rank in ranks]
        if any(statuses):
            # When a rank ends, the collectives of other ranks break, and another rank's end may be
            # noticed first. So wait a moment, and then collect the statuses of all ranks.
            time.sleep(POLL_SECONDS)
            failed = {
                rank: status for rank, process in enumerate(ranks) if (status := process.poll())
            }
            rank, code = first_failure(failed)
            say(describe_end(rank, code, noun=noun))
            on_failure(rank, code)
            return code if code > 0 else 128 - code
        if None not in statuses:
            return 0
        time.sleep(POLL_SECONDS)


def first_failure(failed: Mapping[int, int]) -> tuple[int, int]:
    """Return the rank that failed first, and its Popen.returncode. `failed`: those of all failed
    ranks.
    """
    # The other ranks fail too when the rank for which they wait ends. So a status that names a
    # cause comes first, then a signal, because a killed rank did not fail as a consequence of
    # another failure.
    return min(failed.items(), key=lambda item: (item[1] not in ENDED_FOR_GOOD, item[1] >= 0))


def end_ranks(ranks: Sequence[Rank]) -> None:
    """End the ranks that still run: SIGTERM, then SIGKILL for them and all processes that they have
    started.

    A libp2p daemon of a dead rank would occupy the island's port for seconds. Nothing is killed
    after a life in which all ranks ended with status 0.
    """
    if all(rank.poll() == 0 for rank in ranks):
        return
    signal_ranks(ranks, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def signal_ranks(ranks: Sequence[Rank], number: int) -> None:
    """Send a signal to the ranks that still run."""
    for rank in ranks:
        rank.send_signal(number)


def say(text: str) -> None:
    """Print a line about the ranks to stderr, which also has the ranks' logs."""
    # Failing to print, for example to a full disk, must neither end the ranks nor prevent a
    # restart.
    with suppress(OSError):
        sys.stderr.write(f"diloco: {text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    watch_parent()
    module_and_arguments = sys.argv[3:]
    sys.exit(
        launch_ranks(
            [sys.executable, "-m", *module_and_arguments], int(sys.argv[1]), int(sys.argv[2])
        )
    )
