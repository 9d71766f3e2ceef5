"""Rounds that wait for a quorum (`outer.wait_for`), on whole islands: nobody waits for an island
that trains.
"""

import threading
from contextlib import suppress

import pytest
import torch

from outer.config import CodingConfig, OuterConfig, OuterOptimizerConfig
from outer.errors import OuterError, TransportError
from outer.hooks import NoHooks, Phase
from outer.report import CaughtUp
from outer.transports.loopback import Hub
from tests.outer.islands import GUARD_SECONDS, Island, run_islands
from tests.outer.paces import Trainee
from tests.outer.streams import Stream, layered

torch.set_num_threads(1)


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {"start_islands": num_islands, "transport": "loopback", "wait_seconds": GUARD_SECONDS}
    return OuterConfig(**{**fields, "rounds": 3, "inner_steps": 4, "wait_for": "quorum", **changes})


def until(trainee: Trainee, number: int) -> None:
    """Train until this number of rounds has landed."""
    trainee.run(lambda: trainee.round >= number)


@pytest.mark.parametrize("changes", [{}, {"fragments": 3, "inner_steps": 7}], ids=str)
def test_a_quorum_of_all_makes_the_rounds_of_waiting_for_all_bit_for_bit(
    changes: dict[str, int],
) -> None:
    made = config(3, quorum=3, **changes)
    waiting = config(3, wait_for="all", **changes)
    rounds = made.num_rounds

    def at_own_pace(island: Island) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        trainee = Trainee(island)
        trainee.begin()
        until(trainee, rounds)
        return trainee.global_params(), island.params.flat(), trainee.digests

    def together(island: Island) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        island.outer.begin()
        stream = Stream(island, waiting)
        stream.run(rounds)
        digests = [landing.reports[-1].digest for landing in stream.landings]
        return stream.global_params(), island.params.flat(), digests

    found = run_islands(dict.fromkeys("abc", at_own_pace), made, model=layered)
    expected = run_islands(dict.fromkeys("abc", together), waiting, model=layered)
    for name in "abc":
        assert torch.equal(found[name][0], expected[name][0])
        assert torch.equal(found[name][1], expected[name][1])
        assert found[name][2] == expected[name][2]


@pytest.mark.parametrize("codec", ["fp32", "topk"])
def test_the_others_commit_without_an_island_that_still_trains_and_all_digests_agree(
    codec: str,
) -> None:
    made = config(3, rounds=100, codec=codec, coding=CodingConfig(feedback=0.9))

    def fast(island: Island) -> Trainee:
        trainee = Trainee(island)
        trainee.begin()
        until(trainee, 4)
        return trainee

    def slow(island: Island) -> Trainee:
        trainee = Trainee(island)
        trainee.begin()
        for _ in range(3):
            trainee.step()
        trainee.wait_for_round(4)  # It lands nothing meanwhile: as if it were within an inner step.
        trainee.step()
        trainee.land()
        return trainee

    found = run_islands({"a": fast, "b": fast, "c": slow}, made, model=layered)
    assert found["a"].digests == found["b"].digests == found["c"].digests
    assert len(found["c"].digests) == 4
    for heard in found["c"].heard:
        assert not heard.is_given
        assert "c" in heard.landing.reports[-1].listeners
        assert heard.landing.reports[-1].pseudo_grad_norm == 0


@pytest.mark.parametrize("fragments", [1, 3])
def test_who_listens_keeps_its_own_progress_on_top_of_what_was_committed(fragments: int) -> None:
    made = config(2, rounds=100, fragments=fragments)

    def fast(island: Island) -> None:
        trainee = Trainee(island)
        trainee.begin()
        until(trainee, 2 * fragments)

    def slow(island: Island) -> None:
        trainee = Trainee(island)
        trainee.begin()
        start = trainee.global_params()
        trainee.step()
        progress = island.params.flat() - start
        trainee.wait_for_round(1)
        trainee.land()
        between = trainee.global_params()
        assert not torch.equal(between, start)
        torch.testing.assert_close(island.params.flat() - between, progress, rtol=0, atol=1e-6)
        trainee.step()
        progress += island.params.flat() - between - progress
        trainee.wait_for_round(2 * fragments)
        trainee.land()
        end = trainee.global_params()
        torch.testing.assert_close(island.params.flat() - end, progress, rtol=0, atol=1e-6)

    run_islands({"a": fast, "b": slow}, made, model=layered)


def test_what_an_island_gives_is_its_own_progress_however_many_rounds_it_listened_to() -> None:
    # With plain averaging of one giver the global params move by exactly what it gives.
    made = config(2, rounds=100, optimizer=OuterOptimizerConfig(lr=1.0, momentum=0.0))
    heard_three = threading.Event()

    def fast(island: Island) -> None:
        trainee = Trainee(island)
        trainee.begin()
        until(trainee, 3)
        heard_three.set()
        trainee.wait_for_round(4)

    def slow(island: Island) -> None:
        trainee = Trainee(island)
        trainee.begin()
        progress = torch.zeros_like(island.params.flat())
        for number in range(4):
            before = island.params.flat()
            trainee.step()
            progress += island.params.flat() - before
            trainee.wait_for_round(min(number + 1, 3))
            trainee.land()
        assert heard_three.wait(GUARD_SECONDS)
        before = trainee.global_params()
        trainee.turn()
        assert trainee.heard[-1].is_given
        assert trainee.heard[-1].landing.reports[-1].participants == ["a", "b"]
        torch.testing.assert_close(trainee.global_params() - before, progress, rtol=0, atol=1e-6)
        assert torch.equal(island.params.flat(), trainee.global_params())

    run_islands({"a": fast, "b": slow}, made, model=layered)


def test_tokens_of_a_round_are_those_of_the_islands_that_gave() -> None:
    made = config(2, rounds=100)

    def fast(island: Island) -> int:
        trainee = Trainee(island)
        trainee.begin()
        until(trainee, 2)
        return trainee.heard[-1].position.tokens

    def slow(island: Island) -> int:
        trainee = Trainee(island)
        trainee.begin()
        trainee.step()
        trainee.wait_for_round(2)
        trainee.land()
        return trainee.heard[-1].position.tokens

    assert run_islands({"a": fast, "b": slow}, made, model=layered) == {"a": 800, "b": 800}


def test_a_joiner_between_two_pushes_of_delayed_momentum_goes_on_as_the_others() -> None:
    made = config(2, rounds=100, optimizer=OuterOptimizerConfig(delayed=True))
    may_join, has_joined = threading.Event(), threading.Event()

    def old(island: Island) -> list[str]:
        trainee = Trainee(island)
        trainee.begin()
        if island.name == "a":
            until(trainee, 3)  # One push each: momentum has moved the params after the second.
            may_join.set()
            assert has_joined.wait(GUARD_SECONDS)
            until(trainee, 6)
        else:
            trainee.wait_for_round(6)
            trainee.land()
        return trainee.digests[-1:]

    def joiner(island: Island) -> list[str]:
        assert may_join.wait(GUARD_SECONDS)
        trainee = Trainee(island)
        trainee.begin()
        assert island.outer.replica.carried._optimizer.pushes(0) == 1
        has_joined.set()
        trainee.wait_for_round(6)
        trainee.land()
        return trainee.digests[-1:]

    found = run_islands({"a": old, "b": old, "c": joiner}, made, model=layered)
    assert found["a"] == found["b"] == found["c"] != []


def test_an_island_that_gives_to_every_third_round_gives_another_fragment_each_time() -> None:
    made = config(2, rounds=100, inner_steps=6, fragments=3)

    def fast(island: Island) -> None:
        trainee = Trainee(island)
        trainee.begin()
        trainee.wait_for_round(1)
        trainee.land()
        until(trainee, 4)
        trainee.wait_for_round(5)

    def slow(island: Island) -> list[int]:
        trainee = Trainee(island)
        trainee.begin()
        for _ in range(3):
            trainee.turn()  # Two inner steps, and what they gave.
        for number in (2, 3):
            trainee.wait_for_round(number)
            trainee.step()
            trainee.land()
        # Two steps again, and the turn of the same fragment.
        assert trainee.round == 3
        assert not trainee.rounds.is_due()
        trainee.wait_for_round(4)
        trainee.step()
        trainee.land()
        assert trainee.rounds.is_due()
        trainee.turn()
        return [heard.fragment for heard in trainee.heard if heard.is_given]

    assert run_islands({"a": fast, "b": slow}, made, model=layered)["b"] == [0, 1]


# -- faults ----------------------------------------------------------------------------------------


class DiesAt(NoHooks):
    """Hooks by which the island dies at a phase of a round."""

    def __init__(self, hub: Hub, island: str, phase: Phase, round_number: int) -> None:
        self.has_died = threading.Event()
        self._hub, self._island, self._place = hub, island, (phase, round_number)

    def reached(self, phase: Phase, round_number: int) -> None:
        if (phase, round_number) == self._place:
            self._hub.lose(self._island)
            self.has_died.set()
            raise TransportError("this island has died")


@pytest.mark.parametrize(
    "phase", ["sending", "vote", pytest.param("reducing", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "victim,contributors",
    [("b", "ab"), ("c", "ab"), ("a", "ab"), ("a", "b")],
    ids=["who gives", "who listens", "the planner, who gives", "the planner, who listens"],
)
def test_when_an_island_dies_in_a_round_the_living_commit_it(
    victim: str, contributors: str, phase: Phase
) -> None:
    hub = Hub()
    fault = DiesAt(hub, victim, phase, 2)
    made = config(3, rounds=100)

    def script(island: Island) -> list[str]:
        trainee = Trainee(island)
        trainee.begin()
        if island.name not in contributors and island.name == victim:
            assert fault.has_died.wait(GUARD_SECONDS)
        elif island.name not in contributors:
            trainee.step()
            trainee.wait_for_round(4)
            trainee.land()
        elif island.name != victim:
            until(trainee, 4)
        else:
            with suppress(OuterError):
                trainee.run(fault.has_died.is_set)
        return trainee.digests[:4]

    found = run_islands(
        dict.fromkeys("abc", script), made, model=layered, hub=hub, hooks={victim: fault}
    )
    living = [found[name] for name in "abc" if name != victim]
    assert living[0] == living[1]
    assert len(living[0]) == 4


def test_when_all_that_gave_have_died_the_one_that_listened_goes_on_and_gives() -> None:
    hub = Hub()
    fault = DiesAt(hub, "a", "vote", 2)

    def script(island: Island) -> int:
        trainee = Trainee(island)
        trainee.begin()
        if island.name == "a":
            with suppress(OuterError):
                trainee.run(fault.has_died.is_set)
        else:
            trainee.wait_for_round(2)
            until(trainee, 4)
            assert trainee.heard[-1].is_given
        return trainee.round

    found = run_islands(
        dict.fromkeys("ab", script),
        config(2, rounds=100),
        model=layered,
        hub=hub,
        hooks={"a": fault},
    )
    assert found["b"] == 4


def test_who_missed_a_round_that_it_listened_to_takes_the_state_and_listens_again() -> None:
    made = config(2, rounds=100, inner_steps=2)
    alone, taken = threading.Event(), threading.Event()

    def ahead(island: Island) -> list[str]:
        trainee = Trainee(island)
        trainee.begin()
        until(trainee, 2)
        alone.set()
        assert taken.wait(GUARD_SECONDS)
        until(trainee, 4)
        return trainee.digests[-1:]

    def late(island: Island) -> list[str]:
        # It announces itself only now, as one whose record the others could not see.
        trainee = Trainee(island)
        assert alone.wait(GUARD_SECONDS)
        island.outer.averager.runner.leader.announce()
        trainee.rounds.start()
        with pytest.raises(CaughtUp):
            trainee.run(lambda: False)
        assert trainee.round == 2
        taken.set()
        trainee.made = 0
        trainee.wait_for_round(4)
        trainee.land()
        return trainee.digests[-1:]

    found = run_islands(
        {"a": ahead, "b": late}, made.model_copy(update={"start_islands": 1}), model=layered
    )
    assert found["a"] == found["b"]


@pytest.mark.parametrize(
    "values", [{"delay": 2}, {"mix": 0.5}, {"delay": 2, "eager": True}], ids=str
)
def test_hidden_and_mixed_rounds_wait_for_all(values: dict) -> None:
    with pytest.raises(ValueError, match="set delay and mix to 0, or wait_for to all"):
        config(2, **values)


@pytest.mark.parametrize(
    "changes",
    [{"wait_for": "quorum"}, {"optimizer": OuterOptimizerConfig(delayed=True)}],
    ids=["quorum", "delayed"],
)
def test_moments_are_averaged_by_plain_rounds_of_all(changes: dict) -> None:
    with pytest.raises(ValueError, match="or moments to null"):
        OuterConfig(moments=(1, 1), **changes)


def test_a_checkpoint_between_pushes_is_gone_on_from() -> None:
    made = config(2, rounds=100, inner_steps=2, optimizer=OuterOptimizerConfig(delayed=True))

    def saves(island: Island) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        trainee = Trainee(island)
        trainee.begin()
        while not trainee.rounds.is_due():
            trainee.turn()
        heard = trainee.rounds.contribute(trainee.made, holds=True)
        assert heard.is_given
        tensors, facts = island.outer.save()
        saved = {name: values.clone() for name, values in tensors.items()}, facts
        trainee.made = 0
        trainee.rounds.go_on()
        until(trainee, 2)
        return saved

    def listens(island: Island) -> None:
        trainee = Trainee(island)
        trainee.begin()
        trainee.wait_for_round(2)
        trainee.land()

    def goes_on(island: Island) -> tuple[int, str]:
        tensors, facts = saved
        found = island.outer.allocate(tensors)
        for name, room in found.items():
            room.copy_(tensors[name])
        island.outer.restore(found, facts)
        return island.outer.replica.carried._optimizer.pushes(0), island.outer.digest

    saved = run_islands({"a": saves, "b": listens}, made, model=layered)["a"]
    assert run_islands({"a": goes_on}, made, model=layered)["a"] == (1, saved[1]["digest"])


def test_a_run_of_these_rounds_is_over_by_its_tokens_and_not_by_its_rounds() -> None:
    made = config(1, rounds=3)

    def script(island: Island) -> tuple[bool, bool]:
        trainee = Trainee(island)
        trainee.begin()
        until(trainee, made.num_rounds + 2)
        outer = island.outer
        without_end = outer.is_last(outer.position)
        outer.total_tokens = outer.position.tokens
        return without_end, outer.is_last(outer.position)

    assert run_islands({"a": script}, made, model=layered) == {"a": (False, True)}
