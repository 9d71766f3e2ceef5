"""Several real islands train one model with unequal meshes, a death, a joiner, and an end by
signal.
"""

import signal
from collections.abc import Callable
from functools import cache

import pytest

from diloco.runtime.operator_requests import STOP, make_request
from tests.faults.waits import assert_one_history, more_rounds, until
from tests.swarm import Island, swarm

ONE, FSDP2 = {"ranks": 1}, {"ranks": 2}
# Two stages on each of two ranks, both cut over two: rank-paired exchange would miss most of it.
FOUR = {
    "ranks": 4,
    "mesh": {"pp": 2, "tp": 2},
    "parallel": {"schedule": "interleaved_1f1b"},
    "micro_batch": 2,
}
REPLICATE2 = {"ranks": 2, "mesh": {"dp_replicate": 2}}
END_SECONDS = 60.0
"""A process ends about 5 s after SIGTERM at most. This limit is for a busy machine."""


UNEQUAL = {"fp32-replicate2": ("fp32", REPLICATE2), "int8-pp2-tp2": ("int8", FOUR)}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Island]]:
    """The three islands of a finished run of UNEQUAL with three rounds."""

    @cache
    def trained(name: str) -> list[Island]:
        codec, third = UNEQUAL[name]
        settings = [f"outer.codec={codec}", "model.num_layers=4"]
        with swarm(
            tmp_path_factory.mktemp("unequal"), *settings, islands=[ONE, FSDP2, third]
        ) as islands:
            for island in islands.start_all():
                island.finish()
            return islands.started

    return trained


@pytest.mark.parametrize("name", UNEQUAL)
def test_islands_of_unequal_meshes_hold_equal_digests_after_every_round(unequal, name):
    for round_number in range(3):
        rounds = [island.committed()[round_number] for island in unequal(name)]
        assert rounds[0]["participants"] == ["island-0", "island-1", "island-2"]
        assert len({r["digest"] for r in rounds}) == 1


def test_islands_of_unequal_meshes_start_from_the_same_digest_and_loss(unequal):
    islands = unequal("int8-pp2-tp2")
    assert len({island.records("event")[0]["text"] for island in islands}) == 1
    losses = [island.records("eval")[0]["loss"] for island in islands]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_survivors_go_on_without_an_island_that_was_killed(tmp_path):
    with swarm(tmp_path, "outer.rounds=100000", islands=[ONE, ONE, FSDP2]) as islands:
        first, second, victim = islands.start_all()
        victim.wait_for_round(1)
        victim.signal(signal.SIGKILL)
        more_rounds(first, 3, ["island-0", "island-1"])
        make_request(tmp_path / "test", STOP)
        first.finish()
        second.finish()
        assert_one_history(first, second)


def test_an_island_left_alone_goes_on_and_says_so(tmp_path):
    with swarm(tmp_path, "outer.rounds=100000", islands=[ONE, ONE]) as islands:
        first, victim = islands.start_all()
        victim.wait_for_round(0)
        victim.signal(signal.SIGKILL)
        more_rounds(first, 3, ["island-0"])
        make_request(tmp_path / "test", STOP)
        first.finish()
        assert first.events("alone")


@pytest.mark.slow
def test_a_joiner_takes_the_state_and_commits_equal_digests(tmp_path):
    with swarm(tmp_path, "outer.rounds=40", "outer.inner_steps=4", islands=[ONE, FSDP2]) as islands:
        first, second = islands.start_all()
        first.wait_for_round(1)
        joiner = islands.start(2)
        for island in (first, second, joiner):
            island.finish()
        shared = joiner.committed()
        assert shared and min(shared) >= 2, (
            "the joiner began from the islands' state, not from the start"
        )
        for number, record in shared.items():
            assert record["digest"] == first.committed()[number]["digest"]
            assert record["participants"] == ["island-0", "island-1", "island-2"]


def test_sigterm_ends_an_island_within_seconds_and_others_hear_goodbye(tmp_path):
    with swarm(tmp_path, "outer.rounds=2000", islands=[ONE, FSDP2]) as islands:
        first, leaver = islands.start_all()
        leaver.wait_for_round(0)
        leaver.signal(signal.SIGTERM)
        assert all(code != 0 for code in leaver.wait(END_SECONDS))
        assert leaver.records("event")[-1]["name"] == "left"
        more_rounds(first, 3, ["island-0"])


def test_a_second_island_of_the_same_name_is_refused(tmp_path):
    with swarm(tmp_path, "outer.rounds=2000", islands=[ONE]) as islands:
        first = islands.start(0)
        first.wait_for_round(0)
        config = islands.config.model_copy(
            update={"islands": ({"ranks": 1, "run_dir": str(tmp_path / "other")},)}
        )
        second = islands.start(0, config=config)
        assert second.wait() != [0]
        assert "an island 'island-0' is in the run already" in second.log


def test_an_island_with_another_config_is_told_which_keys_differ(tmp_path):
    with swarm(tmp_path, "outer.rounds=2000", islands=[ONE, ONE]) as islands:
        first = islands.start(0)
        until(lambda: first.records("event"), "the first island's entry", first)
        other = islands.config.outer.model_copy(update={"codec": "int8"})
        second = islands.start(
            1, config=islands.config.model_copy(update={"outer": other, "seed": 7})
        )
        assert second.wait() != [0]
        assert "outer.codec: here 'int8', in the run 'fp32'" in second.log
        assert "seed: here 7, in the run 0" in second.log
