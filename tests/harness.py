"""Runs a function on several ranks. The ranks are forked processes with a gloo group, so torch is
imported once.
"""

import faulthandler
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# A fork hangs if its parent has run OpenMP on several threads.
torch.set_num_threads(1)

THREAD_SECONDS = 10.0
"""How long threads of an earlier test may take to end before ranks are forked."""

TRACEBACK_SECONDS = 1.0
"""How long ranks have to print where they are before they are killed."""


class RankFailed(AssertionError):
    """A rank raised an exception, died or did not finish. The message holds its traceback."""


class RankLate(RankFailed):
    """A rank did not finish in time."""


def run_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 240
) -> list[Any]:
    """Run fn(rank, *args) in a process per rank and return the results in rank order. Raises
    RankFailed.
    """
    _wait_for_threads()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run(rank: int) -> Any:
            _join_group(rank, num_ranks, listener, timeout_seconds)
            return fn(rank, *args)

        held, release = os.pipe()
        pids, pipes = [], []
        try:
            for rank in range(num_ranks):
                pipe, answer = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(release)
                    _child(run, rank, answer, held)
                os.close(answer)
                pids.append(pid)
                pipes.append(pipe)
            return _collect(pids, pipes, time.monotonic() + timeout_seconds)
        except BaseException as error:
            _stop(pids, prints=not isinstance(error, RankFailed) or isinstance(error, RankLate))
            raise
        finally:
            os.close(release)
            for pid in pids:
                os.waitpid(pid, 0)
            for pipe in [held, *pipes]:
                os.close(pipe)


def _stop(pids: list[int], *, prints: bool) -> None:
    """End ranks that have failed or hang. With `prints`, each first prints where its threads
    are.
    """
    if prints:
        for pid in pids:
            os.kill(pid, signal.SIGABRT)
        time.sleep(TRACEBACK_SECONDS)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _wait_for_threads() -> None:
    """Wait until no foreign thread runs. Those of a closed event loop's executor end only after its
    last call.

    A fork inherits the locks of other threads but not the threads, and some libraries restart
    theirs in it. Our own threads hold no locks and do not restart: the parser of messages is made
    anew in a fork, and a loop's executor is used by its loop alone.
    """
    deadline = time.monotonic() + THREAD_SECONDS
    while (foreign := _find_foreign_threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not foreign, f"ranks are forked while other threads run: {foreign}"


def _find_foreign_threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()} - {
        "MainThread",
        "outer-loop",
        "parse messages_0",
    }
    return {
        name
        for name in names
        if not name.endswith(" rounds") and not name.startswith("work of the event loop")
    }


def begin_fork() -> None:
    """Prepare a forked process. It calls this first."""
    # The parent's garbage must not be collected here: gloo's objects join threads that do not exist
    # in a fork.
    gc.freeze()
    # Descriptor 2 is captured by pytest, so the cause of a crash is shown with the failure.
    faulthandler.enable(2)


def _child(run: Callable[[int], Any], rank: int, answer: int, held: int) -> NoReturn:
    """Run one rank in a forked process, send the result to the parent and end the process."""
    begin_fork()
    try:
        message = pickle.dumps((True, run(rank)))
    except BaseException:  # noqa: BLE001 - the parent must learn of any error
        message = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(answer, "wb") as stream:
        stream.write(message)
    # Rank 0 serves the store, so no rank ends before the parent has the results of all.
    os.read(held, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads sometimes abort during a normal interpreter shutdown.
    os._exit(0)


def _join_group(rank: int, num_ranks: int, listener: socket.socket, timeout_seconds: float) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        num_ranks,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def _collect(pids: list[int], pipes: list[int], deadline: float) -> list[Any]:
    """Collect the results in rank order. Raises RankFailed on the first failure."""
    messages = [b""] * len(pipes)
    results: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for rank, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, rank)
        while len(results) < len(pipes):
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                waiting = [rank for rank in range(len(pipes)) if rank not in results]
                raise RankLate(f"ranks {waiting} did not finish in time")
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 20)
                messages[key.data] += piece
                if not piece:
                    selector.unregister(key.fd)
                    if not messages[key.data]:
                        raise RankFailed(f"rank {key.data} died: {_end_of(pids[key.data])}")
                    results[key.data] = _result(key.data, messages[key.data])
    return [results[rank] for rank in range(len(pipes))]


def _end_of(pid: int) -> str:
    """Describe how a process ended, without reaping it. Waits if it is still ending."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    if end.si_code == os.CLD_EXITED:
        return f"exit status {end.si_status}"
    return signal.Signals(end.si_status).name


def _result(rank: int, message: bytes) -> Any:
    is_good, value = pickle.loads(message)
    if not is_good:
        raise RankFailed(f"rank {rank} raised:\n{value}")
    return value
