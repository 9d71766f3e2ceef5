"""Fragments on their way when a round fails, an island dies, joins or misses a commit."""

import threading
from functools import partial

import pytest
import torch

from outer.report import CaughtUp
from tests.outer.islands import GUARD_SECONDS, Island, dies_in, fails_in, run_islands
from tests.outer.streams import NESTEROV, OneProcess, Stream, config, layered, streamed


def test_a_round_that_fails_on_its_way_is_tried_again_with_the_same_snapshot() -> None:
    made = config(3, fragments=3, delay=2)
    found = run_islands(
        dict.fromkeys("abc", partial(streamed, made, 9)),
        made,
        model=layered,
        faults={"b": fails_in(4)},
    )
    expected = OneProcess("abc", made, NESTEROV)
    expected.run(9)
    for name in "abc":
        assert torch.equal(found[name][0], expected.flat_global())
        assert torch.equal(found[name][1], expected.flat_local(name))


def test_when_an_island_dies_with_its_fragment_on_the_way_the_others_commit_it_without() -> None:
    made = config(3, fragments=3, delay=1)

    def script(island: Island) -> list[str]:
        island.outer.begin()
        stream = Stream(island, made)
        if island.name == "b":
            stream.run(4)
            stream.segment()
            stream.launch()
            return []
        stream.run(9)
        assert stream.landings[4].reports[-1].participants == ["a", "c"]
        return [landing.reports[-1].digest for landing in stream.landings]

    found = run_islands(dict.fromkeys("abc", script), made, model=layered, faults={"b": dies_in(4)})
    assert found["a"] == found["c"] and len(found["a"]) == 9


def test_a_joiner_in_the_middle_of_a_cycle_has_the_state_and_commits_the_next_fragments() -> None:
    made = config(2, fragments=3, delay=1)
    ready_to_join, has_begun = threading.Event(), threading.Event()
    all_old = threading.Barrier(2, ready_to_join.set)

    def old(island: Island) -> tuple[list[bytes], list[str]]:
        island.outer.begin()
        stream = Stream(island, made)
        stream.run(4)
        state = island.state()
        all_old.wait(GUARD_SECONDS)
        assert has_begun.wait(GUARD_SECONDS)
        stream.run(9)
        return state, [landing.reports[-1].digest for landing in stream.landings[4:]]

    def joiner(island: Island) -> tuple[list[bytes], list[str]]:
        assert ready_to_join.wait(GUARD_SECONDS)
        assert island.outer.begin().round == 4
        state = island.state()
        has_begun.set()
        stream = Stream(island, made)
        stream.run(9)
        return state, [landing.reports[-1].digest for landing in stream.landings]

    found = run_islands({"a": old, "b": old, "c": joiner}, made, model=layered)
    assert found["a"] == found["b"] == found["c"]


@pytest.mark.parametrize("policy", ["rebase", pytest.param("drop", marks=pytest.mark.slow)])
def test_an_island_that_missed_a_fragment_goes_on_from_the_state_by_the_rule(policy: str) -> None:
    made = config(2, fragments=3, missed_progress=policy, inner_steps=6)
    alone, taken = threading.Event(), threading.Event()
    both = threading.Barrier(2)

    def quick(island: Island) -> list[str]:
        island.outer.begin()
        stream = Stream(island, made)
        stream.run(4)
        both.wait(GUARD_SECONDS)
        island.outer.pace.deadlines.initial_seconds = 0.0
        stream.run(5)  # b is not ready: it is given up
        assert stream.landings[-1].reports[-1].participants == ["a"]
        alone.set()
        assert taken.wait(GUARD_SECONDS)
        island.outer.pace.deadlines.initial_seconds = GUARD_SECONDS
        stream.run(8)
        return [landing.reports[-1].digest for landing in stream.landings[5:]]

    def slow(island: Island) -> list[str]:
        island.outer.begin()
        stream = Stream(island, made)
        stream.run(4)
        both.wait(GUARD_SECONDS)
        stream.segment()
        assert alone.wait(GUARD_SECONDS)
        before = stream.global_params()
        moved = island.params.flat() - before
        stream.launch()
        with pytest.raises(CaughtUp) as caught:
            stream.land()
        assert caught.value.is_kept == (policy == "rebase")
        now, after = island.params.flat(), stream.global_params()
        assert not torch.equal(before, after), "the missed commit is in the state"
        torch.testing.assert_close(
            now - after, moved if policy == "rebase" else torch.zeros_like(moved)
        )
        taken.set()
        stream.run(8)
        return [landing.reports[-1].digest for landing in stream.landings[4:]]

    found = run_islands({"a": quick, "b": slow}, made, model=layered)
    assert found["a"] == found["b"] and len(found["a"]) == 3


def test_an_island_that_missed_the_last_commit_ends_with_the_global_params() -> None:
    made = config(2, rounds=5)
    alone, taken = threading.Event(), threading.Event()
    both = threading.Barrier(2)

    def quick(island: Island) -> bytes:
        island.outer.begin()
        stream = Stream(island, made)
        stream.run(4)
        both.wait(GUARD_SECONDS)
        island.outer.pace.deadlines.initial_seconds = 0.0
        stream.run(5)  # b is not ready: it is given up
        assert stream.landings[-1].reports[-1].participants == ["a"]
        alone.set()
        assert taken.wait(GUARD_SECONDS)
        return island.params.flat().numpy().tobytes()

    def slow(island: Island) -> bytes:
        island.outer.begin()
        stream = Stream(island, made)
        stream.run(4)
        both.wait(GUARD_SECONDS)
        stream.segment()
        assert alone.wait(GUARD_SECONDS)
        stream.launch()
        with pytest.raises(CaughtUp) as caught:
            stream.land()
        taken.set()
        assert not caught.value.is_kept
        return island.params.flat().numpy().tobytes()

    found = run_islands({"a": quick, "b": slow}, made, model=layered)
    assert found["a"] == found["b"]
