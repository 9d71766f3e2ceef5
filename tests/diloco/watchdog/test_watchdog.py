"""A rank that hangs is found, explained by all ranks, ended and restarted."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco.config.schema import dump_config
from diloco.runtime.process_group import open_process_group
from diloco.runtime.processes import island_command, kill, start
from diloco.watchdog.activity import FIRST_SECONDS, FLOOR_SECONDS, ActivityMonitor
from diloco.watchdog.hang_verdict import (
    GroupState,
    RankState,
    from_values,
    group_states,
    reads_tensor,
    verdict,
)
from diloco.watchdog.watchdog import HUNG, Watchdog, WatchedRank, expression_of
from tests.swarm import swarm


def monitor_after(*durations, limit=None):
    now = 0.0
    activity = ActivityMonitor(limit, lambda: now)
    for seconds in durations:
        activity.start("inner step")
        now += seconds
    activity.start("inner step")
    return activity


def test_first_pieces_of_work_may_take_long():
    assert monitor_after(2.0, 2.0, limit=60.0).work.limit_seconds == FIRST_SECONDS


def test_later_ones_may_take_as_long_as_the_last_ones_and_a_floor_or_what_is_set():
    assert monitor_after(100.0, 2.0, 2.0, 2.0).work.limit_seconds == pytest.approx(
        FLOOR_SECONDS + 12.0
    )
    assert monitor_after(100.0, 2.0, 2.0, 2.0, limit=60.0).work.limit_seconds == 60.0


def test_a_wait_for_other_islands_has_no_limit_here_and_is_no_measure():
    activity = monitor_after(2.0, 2.0, 2.0)
    activity.start_untimed("a round")
    assert activity.work.limit_seconds is None
    activity.start("inner step")
    assert activity.work.limit_seconds == pytest.approx(FLOOR_SECONDS + 12.0)


def test_a_round_may_last_while_it_lives_and_be_silent_for_its_longest_wait_and_the_floor():
    activity = monitor_after(2.0, 2.0, 2.0)
    activity.start_beating("a round", 20.0)
    assert (activity.work.limit_seconds, activity.work.has_beats) == (FLOOR_SECONDS + 20.0, True)
    activity.start("a round")
    assert activity.work.limit_seconds == FIRST_SECONDS, "how long a round lasts is no measure"


def group(sequence, *, waits, name="0", ranks=(0, 1, 2), operation="gloo:all_reduce", entered=None):
    return GroupState(name, f"group {name}", ranks, sequence, entered or sequence, operation, waits)


def rank(number, *groups, may_wait=True):
    return RankState(number, "inner step", 7.0, f"file.py:{number}", may_wait, groups)


def verdict_of(*states, num_ranks=3):
    return verdict({state.rank: state for state in states}, num_ranks)


def test_who_did_not_come_to_a_collective_is_named_and_where_it_is():
    text = verdict_of(
        rank(0, group(9, waits=True)), rank(1, group(8, waits=False)), rank(2, group(9, waits=True))
    )
    assert text == (
        "rank 1 did not enter gloo:all_reduce 9 of group 0 (ranks 0 1 2), in which rank 0 2 waits; "
        "rank 1: inner step for 7 s, at file.py:1"
    )


def test_a_rank_that_is_kept_from_a_collective_by_another_is_not_to_blame():
    tp, pp = {"name": "tp", "ranks": (0, 1)}, {"name": "pp", "ranks": (1, 2)}
    text = verdict_of(
        rank(0, group(5, waits=True, **tp)),
        rank(1, group(4, waits=False, **tp), group(3, waits=True, **pp)),
        rank(2, group(2, waits=False, **pp)),
    )
    assert text.startswith("rank 2 did not enter") and "rank 1 did not enter" not in text


def test_a_rank_that_cannot_answer_is_named():
    assert verdict_of(rank(0, group(9, waits=True)), rank(2, group(9, waits=True))).startswith(
        "rank 1 did not enter"
    )
    assert (
        verdict_of(rank(0), rank(2))
        == "rank 1 did not answer: frozen, dead, or with a blocked interpreter"
    )


def test_ranks_that_wait_for_one_another_are_all_named():
    first, second = group(3, waits=True), group(3, waits=True, operation="gloo:barrier")
    text = verdict_of(rank(0, first), rank(1, second), rank(2, second))
    assert "rank 0 in gloo:all_reduce 3" in text and "rank 1 in gloo:barrier 3" in text


def test_without_a_collective_the_rank_outside_of_torch_is_named():
    text = verdict_of(rank(0), rank(1, may_wait=False), rank(2))
    assert "rank 1: inner step" in text and "rank 0" not in text


def entry(
    name, sequence, *, retired=True, p2p=False, operation="gloo:all_reduce", state="scheduled"
):
    """An entry of torch's flight recorder. gloo's stay `scheduled`; NCCL's become `started` and
    `completed`.
    """
    return {
        "process_group": [name, "purpose"],
        "collective_seq_id": sequence,
        "profiling_name": operation,
        "retired": retired,
        "is_p2p": p2p,
        "state": state,
    }


def nccl(name, *states, operation="nccl:all_reduce"):
    """The entries of a group's collectives 1, 2, ... in these states, as NCCL's watchdog leaves
    them in a hang.
    """
    return [
        entry(name, number, retired=False, operation=operation, state=state)
        for number, state in enumerate(states, start=1)
    ]


GROUPS = {"0": ("group 0", (0, 1, 2)), "1": ("group 1", (0, 1, 2))}


def test_of_a_trace_the_last_collective_of_each_group_of_the_island_counts():
    trace = [
        entry("0", 1),
        entry("elsewhere", 7),
        entry("0", 2, retired=False),
        entry("0", 0, p2p=True),
    ]
    assert group_states(trace, GROUPS) == [replace(group(2, waits=True), name="0/gloo")]


def test_of_nccl_s_trace_the_first_collective_that_has_not_completed_holds_the_rank():
    (found,) = group_states(nccl("0", "completed", "started", "scheduled", "scheduled"), GROUPS)
    assert (found.sequence, found.entered, found.is_waiting) == (2, 4, True)


def test_a_group_s_collectives_over_gloo_and_nccl_are_counted_apart():
    trace = [*nccl("0", "completed", "completed"), entry("0", 7)]
    assert [(state.name, state.sequence) for state in group_states(trace, GROUPS)] == [
        ("0/nccl", 2),
        ("0/gloo", 7),
    ]


def nccl_rank(number, trace, *, may_wait):
    return rank(number, *group_states(trace, GROUPS), may_wait=may_wait)


def test_of_ranks_that_have_enqueued_ahead_the_one_that_has_not_come_is_named():
    # Ranks 0 and 2 have enqueued two collectives more, and wait where they read the second's
    # result.
    ahead = nccl("0", "completed", "started", "scheduled")
    late = nccl("0", "completed")
    text = verdict_of(
        nccl_rank(0, ahead, may_wait=True),
        nccl_rank(1, late, may_wait=False),
        nccl_rank(2, ahead, may_wait=True),
    )
    assert text.startswith(
        "rank 1 did not enter nccl:all_reduce 2 of group 0 (ranks 0 1 2), in which rank 0 2 waits"
    )


def test_a_rank_whose_thread_is_elsewhere_is_named_although_its_gpu_waits_in_another_collective():
    # Rank 1 has enqueued group 1's collective, for which the others come too late, and hangs in its
    # own code.
    late = [*nccl("0", "completed"), *nccl("1", "started", operation="nccl:all_gather")]
    text = verdict_of(
        nccl_rank(0, nccl("0", "completed", "started"), may_wait=True),
        nccl_rank(1, late, may_wait=False),
        nccl_rank(2, nccl("0", "completed", "started"), may_wait=True),
    )
    assert (
        text.startswith("rank 1 did not enter nccl:all_reduce 2")
        and "; rank 0 did not enter" not in text
    )


def test_a_rank_that_reads_a_number_from_the_gpu_waits_and_is_not_to_blame():
    sums, at_read = torch.ones(3), []

    class Watched:
        def tolist(self):
            at_read.append(expression_of(sys._getframe(1)))
            return sums.tolist()

    watched = Watched()
    total = sum(watched.tolist()) + len(at_read)
    assert (total, at_read, reads_tensor(at_read[0])) == (4.0, ["watched.tolist()"], True)
    assert not reads_tensor("read_batches(path)")


def test_a_state_travels_as_json():
    state = rank(1, group(8, waits=False))
    assert from_values(json.loads(json.dumps(asdict(state)))) == state


def one_rank_hangs(config, index):
    """Rank 1 of three does not enter the last collective."""
    island = config.for_island(index)
    folder = Path(island.run_dir) / config.name / island.label
    activity = ActivityMonitor(0.5)
    with open_process_group(island, "cpu") as ranks:

        def tell(text):
            (folder / "told.txt").write_text(f"{ranks.rank}: {text}")

        with Watchdog(activity, WatchedRank(ranks.rank, 3, folder, tell)):
            make_some_steps(activity)
            for _ in range(4):
                dist.all_reduce(torch.ones(1))
            # The others have no limit of their own.
            activity.start("inner step") if ranks.rank == 1 else activity.start_untimed("a round")
            read_data_for_ever() if ranks.rank == 1 else dist.all_reduce(torch.ones(1))


def make_some_steps(activity):
    """Have the limit of inner steps apply from now on, but not yet: collectives take long on a busy
    machine.
    """
    for _ in range(4):
        activity.start("inner step")
    activity.start_untimed("collectives")


def read_data_for_ever():
    threading.Event().wait()


def test_every_rank_says_where_it_stands_one_tells_the_verdict_and_all_end(tmp_path):
    with swarm(tmp_path, islands=[{"ranks": 3}]) as islands:
        island = islands.start(0, one_rank_hangs)
        assert island.wait() == [HUNG] * 3
        told = (island.folder / "told.txt").read_text()
        assert told.startswith(
            "0: inner step has taken longer than 0.5 s on rank 1; rank 1 did not enter "
            "gloo:all_reduce 5"
        )
        dumps = [(island.folder / f"hang-{number}.txt").read_text() for number in range(3)]
        assert ["read_data_for_ever" in dump for dump in dumps] == [False, True, False]
        assert all("Thread 0x" in dump and '"collective_seq_id": 4' in dump for dump in dumps)
        assert all(told.removeprefix("0: ") in dump for dump in dumps)


def a_round_stands_still(config, index):
    """It shows signs of life for longer than its limit, and then none any more."""
    island = config.for_island(index)
    folder = Path(island.run_dir) / config.name / island.label
    activity = ActivityMonitor(1.5)
    with (
        open_process_group(island, "cpu"),
        Watchdog(activity, WatchedRank(0, 1, folder, (folder / "told.txt").write_text)),
    ):
        activity.start_beating("a round", 0.5)
        for _ in range(8):
            activity.beat()
            time.sleep(0.5)
        (folder / "was-alive").touch()
        threading.Event().wait()


def test_an_island_whose_round_shows_no_sign_of_life_is_ended(tmp_path):
    with swarm(tmp_path, islands=[{}]) as islands:
        island = islands.start(0, a_round_stands_still)
        assert island.wait() == [HUNG]
        assert (island.folder / "was-alive").exists()
        told = (island.folder / "told.txt").read_text()
        assert told.startswith("a round has shown no sign of life for 2 s on rank 0")


def one_rank_dies_while_the_verdict_is_told(config, index):
    """Rank 1 hangs; its death breaks the collective of rank 0, which is telling the verdict."""
    island = config.for_island(index)
    folder = Path(island.run_dir) / config.name / island.label
    activity, is_broken = ActivityMonitor(0.5), threading.Event()
    with open_process_group(island, "cpu") as ranks:
        pids = ranks.gather(os.getpid())

        def tell(text):
            os.kill(pids[1], signal.SIGKILL)
            assert is_broken.wait(30)
            # Time enough for the training thread to end the process, if it may.
            threading.Event().wait(2)

        with Watchdog(activity, WatchedRank(ranks.rank, 2, folder, tell)):
            make_some_steps(activity)
            for _ in range(5):
                dist.all_reduce(torch.ones(1))
            activity.start("inner step")
            read_data_for_ever() if ranks.rank == 1 else None
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1))
            is_broken.set()
            raise RuntimeError("a collective broke")


def test_a_rank_whose_collective_breaks_as_another_ends_has_the_status_of_the_hang(tmp_path):
    with swarm(tmp_path, islands=[{"ranks": 2}]) as islands:
        island = islands.start(0, one_rank_dies_while_the_verdict_is_told)
        assert island.wait() == [HUNG, -signal.SIGKILL], island.log
        assert "a collective broke" not in island.log


@pytest.mark.slow
def test_an_island_is_started_again_whose_rank_hangs_in_its_data(tmp_path):
    settings = [
        "outer.rounds=4",
        "island.watchdog_seconds=4",
        "outer.transport=loopback",
        "island.device=cpu",
    ]
    with swarm(
        tmp_path, *settings, "optimizer.tokens_per_step=384", islands=[{"ranks": 3}]
    ) as made:
        (tmp_path / "run.yaml").write_text(dump_config(made.config))
        command = island_command(
            3, [str(tmp_path / "run.yaml")], max_restarts=1, module="tests.faults.hangs"
        )
        child = start("island-0", command, tmp_path / "log.txt")
        try:
            assert child.process.wait(120) == 0, child.log_tail(60)
        finally:
            kill([child])
    folder = tmp_path / "test" / "island-0"
    assert sorted(path.name for path in folder.glob("hang-*")) == [
        "hang-0.txt",
        "hang-1.txt",
        "hang-2.txt",
    ]
    assert "sleep_in_the_data" in (folder / "hang-1.txt").read_text()
    lines = (tmp_path / "test" / "LOGBOOK.md").read_text().splitlines()
    (cause,) = (line for line in lines if " cause: " in line)
    assert (
        "'hung: " in cause
        and "rank 1 did not enter gloo:all_reduce" in cause
        and "sleep_in_the_data" in cause
    )
    assert "restart 1" in lines[lines.index(cause) - 1]
    assert "the run's 4 rounds are done" in lines[-1]
