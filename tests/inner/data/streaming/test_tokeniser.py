"""The process that tokenises: it dies, is shared, and ends with those that read."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from inner.data.streaming.cache import ShardCache
from inner.data.streaming.index import shard_name
from inner.data.streaming.open import FOLDER, open_cache, shards_identity
from inner.data.streaming.tokeniser import TokeniserSupply
from inner.errors import InputError
from tests.inner.data.streaming.texts import (
    COMMAND,
    opened,
    options_of,
    read_units,
    rows_config,
    write_rows,
)

GUARD_SECONDS = 60.0


def supply_of(folder: Path, cache: Path) -> TokeniserSupply:
    config = rows_config(folder)
    return TokeniserSupply(
        config, shards_identity(config), open_cache(cache, options_of()), COMMAND
    )


def tokeniser_pids() -> set[int]:
    """Processes that tokenise for this one."""
    children = {
        pid
        for task in Path("/proc/self/task").glob("*/children")
        for pid in task.read_text().split()
    }
    return {
        int(pid)
        for pid in children
        if b"diloco.runtime.corpus" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def test_a_tokeniser_that_dies_is_started_again(tmp_path: Path) -> None:
    supply = supply_of(write_rows(tmp_path / "text"), tmp_path / "cache")
    try:
        supply.bring(1)
        (pid,) = tokeniser_pids()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        supply.bring(2)
        assert (supply.folder / shard_name(2)).exists() and tokeniser_pids() not in (set(), {pid})
    finally:
        supply.close()
    assert tokeniser_pids() == set()


def test_a_tokeniser_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    supply = TokeniserSupply(config, shards_identity(config), ShardCache(tmp_path, None), ["false"])
    with pytest.raises(InputError, match=r"the tokeniser process has died \(exit code 1\)"):
        supply.bring(0)


def read_in_process(folder: Path, cache: Path, answers: "multiprocessing.Queue[list[int]]") -> None:
    with opened(rows_config(folder), cache) as corpus:
        answers.put(read_units(corpus, range(40)).sum(dim=1).tolist())


def test_processes_that_share_a_cache_make_each_shard_once(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "text")
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    processes = [
        fork.Process(target=read_in_process, args=(folder, tmp_path / "cache", answers))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=GUARD_SECONDS) for _ in processes]
    for process in processes:
        process.join(GUARD_SECONDS)
    assert found[0] == found[1] == found[2] and [process.exitcode for process in processes] == [
        0,
        0,
        0,
    ]
    with opened(rows_config(folder), tmp_path / "alone") as corpus:
        assert found[0] == read_units(corpus, range(40)).sum(dim=1).tolist()


def test_the_tokeniser_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    folder, here = write_rows(tmp_path / "text"), tmp_path / "pid"
    pid = os.fork()
    if pid == 0:
        supply = supply_of(folder, tmp_path / "cache")
        supply.bring(0)
        here.write_text(str(*tokeniser_pids()))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + GUARD_SECONDS
    while Path(f"/proc/{here.read_text()}").exists():
        assert time.monotonic() < deadline, "the tokeniser outlives its island"
        time.sleep(0.02)


def test_the_tokeniser_ends_when_the_text_is_closed(tmp_path: Path) -> None:
    with opened(rows_config(write_rows(tmp_path / "text")), tmp_path / "cache") as corpus:
        read_units(corpus, range(4))
        assert len(tokeniser_pids()) == 1
    assert tokeniser_pids() == set()


def test_several_processes_tokenise_the_same(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    with opened(config, tmp_path / "one") as corpus:
        one = read_units(corpus, range(20))
    with opened(config, tmp_path / "two", command=[*COMMAND[:-1], "2"]) as corpus:
        assert torch.equal(read_units(corpus, range(20)), one)
    assert len(list((tmp_path / "two" / FOLDER).glob("*/[0-9]*.bin"))) >= 5
