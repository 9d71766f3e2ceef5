"""What the operator asks of running islands: files, signals, a limit of time."""

import os
import signal
import threading

import pytest

from diloco.runtime import operator_requests
from diloco.runtime.operator_requests import (
    SAVE,
    STOP,
    OperatorRequest,
    OperatorRequests,
    RunClock,
    is_listening,
    lock_listener,
    make_request,
)
from outer.space.ranks import RankGroup
from tests.harness import run_ranks
from tests.swarm import swarm


def build_requests(folder, max_hours=None):
    return OperatorRequests(RankGroup(), folder, max_hours, started_at=0.0 if max_hours else 1e12)


def test_nothing_is_wanted_of_an_island_that_nobody_asks_for_anything(tmp_path):
    assert build_requests(tmp_path / "run" / "island-0").poll(1) == OperatorRequest()


def test_a_request_to_save_is_accepted_once_and_lasts_until_it_is_fulfilled(tmp_path):
    requests = build_requests(tmp_path / "run" / "island-0")
    make_request(tmp_path / "run" / "island-0", SAVE)
    assert [requests.poll(1).save, requests.poll(1).save] == [True, True]
    assert not (tmp_path / "run" / "island-0" / SAVE).exists()
    requests.mark_saved()
    assert not requests.poll(1).save


@pytest.mark.parametrize(("text", "stops"), [("", [4, 5]), ("5\n", [5]), ("soon", [4, 5])])
def test_an_island_stops_after_the_round_going_on_or_the_one_that_the_file_names(
    tmp_path, text, stops
):
    requests = build_requests(tmp_path / "run" / "island-0")
    assert not requests.poll(3).stop
    (tmp_path / "run" / "island-0" / STOP).write_text(text)
    assert [done for done in (4, 5) if requests.poll(done).stop] == stops
    assert not (tmp_path / "run" / "island-0" / STOP).exists()


def test_a_request_to_the_run_stops_all_islands_that_run_here_after_the_same_round(tmp_path):
    first, second = (build_requests(tmp_path / "run" / f"island-{i}") for i in range(2))
    ended = build_requests(tmp_path / "run" / "island-2")
    ended.close()
    assert not second.poll(7).stop
    make_request(tmp_path / "run", STOP)
    assert not first.poll(7).stop, "the other is in the next round by now, perhaps"
    assert [first.poll(8).stop, second.poll(8).stop] == ["asked to stop after 8 rounds"] * 2
    assert not (tmp_path / "run" / "island-2" / STOP).exists(), (
        "nobody would take it up before its next start"
    )
    assert not (tmp_path / "run" / STOP).exists()


def test_the_number_is_waited_for_where_the_file_is_empty_at_first(tmp_path, monkeypatch):
    monkeypatch.setattr(operator_requests, "WRITE_SECONDS", 60.0)
    requests = build_requests(tmp_path / "run" / "island-0")
    path = tmp_path / "run" / "island-0" / STOP
    path.touch()
    writer = threading.Timer(0.05, path.write_text, ["9\n"])
    writer.start()
    stop = requests.poll(8).stop
    writer.join()
    assert not stop
    assert requests.poll(9).stop == "asked to stop after 9 rounds"


def test_a_request_that_is_forwarded_is_there_whole_or_not_at_all(tmp_path):
    requests = build_requests(tmp_path / "run" / "island-0")
    path = tmp_path / "run" / "island-0" / STOP
    path.write_text("before")
    before = tmp_path / "before"
    os.link(path, before)
    (tmp_path / "run" / STOP).write_text("9\n")
    operator_requests.forward_request(tmp_path / "run", STOP, "8")
    assert path.read_text() == "9"
    assert before.read_text() == "before", "the file was replaced, not written over"
    requests.close()


def test_nobody_listens_in_a_folder_whose_island_has_ended(tmp_path):
    lock = lock_listener(tmp_path)
    assert is_listening(tmp_path / "listens")
    os.close(lock)
    assert not is_listening(tmp_path / "listens")


def answers_of(rank, folder):
    import torch.distributed as dist

    requests = OperatorRequests(RankGroup(dist.new_group(backend="gloo")), folder, None, 0.0)
    if rank == 1:
        make_request(folder, SAVE)
    dist.barrier()
    return requests.poll(1)


def test_every_rank_comes_to_the_same_answer(tmp_path):
    assert (
        run_ranks(answers_of, 2, tmp_path / "run" / "island-0") == [OperatorRequest(save=True)] * 2
    )


def test_there_is_time_for_another_round_as_long_as_the_longest_of_the_last_ones_fits(tmp_path):
    now = 1000.0
    clock = RunClock(tmp_path, 1000.0, lambda: now)
    for done, seconds in enumerate([0, 20, 50, 10]):
        now += seconds
        clock.observe(done)
    assert not clock.would_exceed(130.0)  # 80 s have passed
    assert clock.would_exceed(129.0)


def test_time_goes_on_when_an_island_is_started_again(tmp_path, monkeypatch):
    RunClock(tmp_path, 1000.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert RunClock(tmp_path, 5000.0, lambda: 5000.0).would_exceed(3999.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not RunClock(tmp_path, 5000.0, lambda: 5000.0).would_exceed(3999.0)


def test_an_island_leaves_when_another_round_does_not_fit(tmp_path):
    assert (
        "max_hours=0.5" in build_requests(tmp_path / "run" / "island-0", max_hours=0.5).poll(1).stop
    )


def test_islands_asked_to_stop_leave_well_after_the_same_round_and_note_why(tmp_path):
    # Both are needed in each round, so that neither is left out because a busy machine makes it
    # late.
    with swarm(
        tmp_path, "outer.rounds=100000", "outer.quorum=2", islands=[{"ranks": 2}, {}]
    ) as islands:
        running = islands.start_all()
        running[0].wait_for_round(1)
        make_request(tmp_path / "test", STOP)
        for island in running:
            island.finish()
        assert len({max(island.committed()) for island in running}) == 1
        assert all(
            len(r["participants"]) == 2 for island in running for r in island.committed().values()
        )
        last = running[0].committed()
        assert f"stop after {len(last)} rounds" in running[1].events("left")[0]
        book = (tmp_path / "test" / "LOGBOOK.md").read_text()
        assert book.count("**island-1** left: asked to stop") == 1


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_any_rank_stops_the_island_after_its_round_with_nothing_lost(tmp_path, delay):
    with swarm(
        tmp_path, "outer.rounds=100000", f"outer.delay={delay}", islands=[{"ranks": 2}]
    ) as islands:
        (island,) = islands.start_all()
        island.wait_for_round(1)
        island.ranks[1].signal(signal.SIGUSR2)
        island.finish()
        steps = len(island.records("step"))
        assert steps == sum(record["steps"] for record in island.committed().values())
