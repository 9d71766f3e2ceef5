"""The launcher of an island's ranks, with ranks that are small programs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.errors import FINAL_STATUS
from diloco.runtime import rank_launcher
from diloco.runtime.processes import Child, find_processes, kill, start

ROOT = Path(__file__).parents[3]
LAUNCH = """
import sys
sys.path.insert(0, {root!r})
from diloco.runtime import rank_launcher
rank_launcher.STOP_SECONDS = {stop_seconds}
command = [sys.executable, "-S", "-c", {rank!r}]
sys.exit(rank_launcher.launch_ranks(command, {num_ranks}, {max_restarts}))
"""
RANK = """
import os, signal, subprocess, sys, time
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def say(line): os.write(1, f"{line}\\n".encode())  # print would mix the lines of two ranks
say(f"rank {rank} life {life}")
"""
WAIT = """
signal.signal(signal.SIGTERM, lambda *_: (say('goodbye'), os._exit(143)))
say('waits')
time.sleep(600)
"""
Launch = Callable[..., Child]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start a launcher whose ranks run RANK and then `program`. Kills everything at the end."""
    started: list[Child] = []

    def launch(
        program: str, num_ranks: int = 2, max_restarts: int = 0, stop_seconds: float = 60.0
    ) -> Child:
        values = {
            "num_ranks": num_ranks,
            "max_restarts": max_restarts,
            "stop_seconds": stop_seconds,
        }
        code = LAUNCH.format(root=str(ROOT), rank=RANK + program, **values)
        started.append(
            start(
                "island", [sys.executable, "-S", "-c", code], tmp_path / f"log-{len(started)}.txt"
            )
        )
        return started[-1]

    yield launch
    kill(started)


def end_of(child: Child) -> tuple[int, list[str]]:
    """The exit status and the lines of the log. Fails the test if a process is left."""
    status = child.process.wait(60)
    wait_until(lambda: not find_processes([child]), "the end of every process")
    return status, child.log.read_text().splitlines()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in time"
        time.sleep(0.02)


def wait_for_lines(child: Child, line: str, count: int) -> None:
    wait_until(
        lambda: child.log.read_text().splitlines().count(line) == count, f"{count} times {line!r}"
    )


def test_every_rank_learns_its_place_and_finds_the_same_store(launch):
    island = launch(
        f"path = os.environ[{rank_launcher.STORE!r}]\n"
        "open(path, 'ab').write(b'x')\n"
        "while os.stat(path).st_size < 3: time.sleep(0.01)\n"
        "say(' '.join(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', "
        "'LOCAL_WORLD_SIZE')))",
        num_ranks=3,
    )
    status, lines = end_of(island)
    assert status == 0 and {"0 0 3 3", "1 1 3 3", "2 2 3 3"} <= set(lines)


def test_the_store_is_a_file_where_there_are_none_in_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with rank_launcher.open_store() as (path, descriptors):
        assert descriptors == () and Path(path).parent.stat().st_mode & 0o777 == 0o700
    assert not Path(path).parent.exists()


def test_when_one_rank_dies_all_are_started_again_as_often_as_allowed(launch):
    # Rank 1 dies when both have said that they live: the launcher then ends the other one at once.
    program = (
        f"path = os.environ[{rank_launcher.STORE!r}]\n"
        "open(path, 'ab').write(b'x')\n"
        "while os.stat(path).st_size < 2: time.sleep(0.01)\n"
        f"if rank == 1: os.kill(os.getpid(), signal.SIGKILL){WAIT}"
    )
    island = launch(program, max_restarts=2)
    status, lines = end_of(island)
    assert status == 128 + signal.SIGKILL
    assert [
        lines.count(f"rank {rank} life {life}") for rank in (0, 1) for life in (0, 1, 2, 3)
    ] == [1, 1, 1, 0] * 2
    assert lines.count("diloco: rank 1 was ended by SIGKILL") == 3
    assert "diloco: starting all ranks again: restart 2 of 2" in lines


def test_a_second_life_that_ends_well_is_a_success(launch):
    status, lines = end_of(launch("sys.exit(3 if rank == 0 and life == 0 else 0)", max_restarts=1))
    assert status == 0 and "diloco: rank 0 ended with status 3" in lines


@pytest.mark.parametrize("status", [FINAL_STATUS, 143])
def test_a_refusal_and_a_request_to_leave_are_final(launch, status):
    island = launch(
        "import fcntl\n"
        f"path = os.environ[{rank_launcher.STORE!r}]\n"
        "store = open(path, 'ab')\n"
        "if rank == 0:\n"
        "    while not os.stat(path).st_size: time.sleep(0.01)\n"
        "fcntl.flock(store, fcntl.LOCK_EX)\n"
        "if rank == 0: os._exit(1)  # as when the collective with rank 1, which has ended, breaks\n"
        "store.write(b'x'); store.flush()\n"
        f"os._exit({status})",
        max_restarts=3,
    )
    ended, lines = end_of(island)
    assert ended == status and "rank 1 life 1" not in lines


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_launcher_that_is_told_to_stop_lets_its_ranks_say_goodbye(launch, number, status):
    island = launch(WAIT, max_restarts=3)
    wait_for_lines(island, "waits", 2)
    island.process.send_signal(number)
    ended, lines = end_of(island)
    assert ended == status and lines.count("goodbye") == 2 and "rank 0 life 1" not in lines


def test_ranks_that_do_not_end_are_killed(launch):
    island = launch(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('waits')\ntime.sleep(600)",
        stop_seconds=0.2,
    )
    wait_for_lines(island, "waits", 2)
    island.process.terminate()
    assert end_of(island)[0] == 143


def test_what_a_failed_rank_has_started_ends_with_it(launch):
    child = "subprocess.Popen(['sleep', '600'])\n"
    status, _ = end_of(launch(child + "sys.exit(5 if rank == 1 else 0)"))
    assert status == 5


def test_signals_that_ask_for_something_reach_every_rank(launch):
    island = launch(f"signal.signal(signal.SIGUSR2, lambda *_: say('asked')){WAIT}")
    wait_for_lines(island, "waits", 2)
    island.process.send_signal(signal.SIGUSR2)
    wait_for_lines(island, "asked", 2)
    assert island.exit_code is None


def test_ranks_leave_when_their_launcher_is_killed(launch):
    island = launch(WAIT)
    wait_for_lines(island, "waits", 2)
    island.process.kill()
    status, lines = end_of(island)
    assert status == -signal.SIGKILL and lines.count("goodbye") == 2


def test_it_starts_without_torch():
    code = (
        "import sys, diloco.runtime.rank_launcher; sys.exit('torch' in sys.modules or "
        "'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=180).returncode == 0
