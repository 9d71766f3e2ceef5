"""Islands whose losses do not become finite go back to an earlier state together, or not at all."""

import threading
from contextlib import suppress
from itertools import chain

import pytest
import torch

from outer.config import OuterConfig
from outer.loop import OuterLoop
from outer.report import CaughtUp, RoundReport
from outer.state.earlier import EarlierState
from tests.outer.islands import GUARD_SECONDS, Island, run_islands
from tests.outer.paces import Trainee
from tests.outer.streams import layered

torch.set_num_threads(1)

TOKENS = 100
BROKEN = 1e30


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {
        "start_islands": num_islands,
        "transport": "loopback",
        "wait_seconds": GUARD_SECONDS,
        "rounds": 12,
    }
    return OuterConfig(**{**fields, **changes})


def saved(outer: OuterLoop) -> EarlierState:
    """The committed state as a checkpoint would give it back later."""
    tensors, facts = outer.save()
    return outer.read_earlier({name: values.clone() for name, values in tensors.items()}, facts)


def land(island: Island, earlier: EarlierState | None = None) -> RoundReport:
    """One round without inner steps of its own."""
    island.outer.launch(TOKENS, earlier)
    return island.outer.land().reports[-1]


def train_and_land(island: Island) -> RoundReport:
    island.train(island.outer.position.round)
    return land(island)


def break_params(island: Island) -> None:
    for values in island.params.values:
        values.fill_(BROKEN)


def state_after(island: Island) -> tuple[list[bytes], torch.Tensor]:
    """Params and momentum by part, without their position, and the local params."""
    bodies = [body.split(b"\n", 1)[1] for body in island.state()]
    return bodies, island.params.flat()


@pytest.mark.parametrize("changes", [{}, {"fragments": 3}, {"codec": "int8"}], ids=str)
def test_all_go_back_to_the_bits_of_then_and_forward_in_rounds(changes: dict[str, object]) -> None:
    def script(island: Island) -> tuple[object, ...]:
        island.outer.begin()
        for _ in range(4):
            train_and_land(island)
        earlier, before = saved(island.outer), state_after(island)[0]
        for _ in range(2):
            train_and_land(island)
        position = island.outer.position
        report = land(island, earlier)
        after = island.outer.position
        assert (report.earlier, report.is_committed) == (4, True)
        assert (after.round, after.tokens) == (position.round + 1, position.tokens + 3 * TOKENS)
        bodies, local = state_after(island)
        assert bodies == before, "params and momentum are those of then"
        assert train_and_land(island).is_committed, "the next round averages again"
        return report.digest, local.tolist(), island.outer.digest

    found = run_islands(dict.fromkeys("abc", script), config(3, **changes), model=layered)
    assert found["a"] == found["b"] == found["c"]


def test_local_params_continue_from_the_state_of_then() -> None:
    def script(island: Island) -> None:
        island.outer.begin()
        train_and_land(island)
        earlier, local = saved(island.outer), island.params.flat()
        train_and_land(island)
        break_params(island)
        land(island, earlier)
        assert torch.equal(island.params.flat(), local)

    run_islands(dict.fromkeys("ab", script), config(2))


def test_one_of_three_cannot_make_the_others_go_back_and_takes_part_as_ever() -> None:
    def script(island: Island) -> tuple[object, ...]:
        island.outer.begin()
        train_and_land(island)
        earlier = saved(island.outer)
        train_and_land(island)
        island.train(2)
        report = land(island, earlier if island.name == "a" else None)
        return report.earlier, report.participants, report.digest

    found = run_islands(dict.fromkeys("abc", script), config(3))
    assert found["a"] == found["b"] == found["c"]
    assert found["a"][:2] == (None, ["a", "b", "c"])


def test_half_of_the_islands_do_not_go_back() -> None:
    def script(island: Island) -> int | None:
        island.outer.begin()
        train_and_land(island)
        earlier = saved(island.outer)
        train_and_land(island)
        return land(island, earlier if island.name == "a" else None).earlier

    assert run_islands(dict.fromkeys("ab", script), config(2)) == {"a": None, "b": None}


def test_two_of_three_go_back_and_the_third_takes_their_state() -> None:
    def script(island: Island) -> str:
        island.outer.begin()
        train_and_land(island)
        earlier = saved(island.outer)
        train_and_land(island)
        if island.name == "c":
            with pytest.raises(
                CaughtUp, match="a, b went back to an earlier state, which this island lacks"
            ):
                land(island)
        else:
            assert land(island, earlier).participants == ["a", "b", "c"]
        participants = list[str]()
        while participants != ["a", "b", "c"]:
            with suppress(CaughtUp):
                participants = train_and_land(island).participants
        return island.outer.digest

    found = run_islands(dict.fromkeys("abc", script), config(3))
    assert len(set(found.values())) == 1


def test_islands_that_name_different_states_average() -> None:
    def script(island: Island) -> int | None:
        island.outer.begin()
        states = []
        for _ in range(3):
            train_and_land(island)
            states.append(saved(island.outer))
        return land(island, states["abc".index(island.name)]).earlier

    assert set(run_islands(dict.fromkeys("abc", script), config(3)).values()) == {None}


def test_what_filters_and_feedback_remember_of_rounds_since_is_forgotten() -> None:
    def script(island: Island) -> None:
        island.outer.begin()
        train_and_land(island)
        earlier = saved(island.outer)
        train_and_land(island)
        memory = island.outer.averager.memory
        assert any(feedback.residuals for feedback in memory.feedbacks)
        land(island, earlier)
        assert not any(feedback.residuals for feedback in memory.feedbacks)

    feedback = {"codec": "int4", "coding": {"feedback": 0.9}}
    run_islands(dict.fromkeys("ab", script), config(2, **feedback))


def test_observers_whose_offer_stands_go_back_and_give_up_what_they_have_trained_since() -> None:
    made = config(3, wait_for="quorum", quorum=1, inner_steps=4)
    have_offered, have_taken = threading.Barrier(3), threading.Barrier(3)

    def reach(trainee: Trainee, number: int) -> None:
        """Land this round: island a contributes to it, and the others observe it."""
        if trainee.island.name == "a":
            trainee.run(lambda: trainee.round >= number)
        else:
            trainee.wait_for_round(number)
            trainee.land()

    def script(island: Island) -> tuple[object, ...]:
        trainee = Trainee(island)
        trainee.begin()
        reach(trainee, 1)
        earlier, before = saved(island.outer), state_after(island)[0]
        reach(trainee, 2)
        if island.name != "c":
            trainee.rounds.offer(earlier)
        trainee.step()
        have_offered.wait(GUARD_SECONDS)
        if island.name == "c":
            with pytest.raises(CaughtUp, match="which this island lacks") as caught:
                while True:  # A round that was committed before lands first.
                    reach(trainee, 99)
            assert not caught.value.is_kept, "its inner step since is given up"
        elif island.name == "a":
            while trainee.heard[-1].earlier is None:
                trainee.take(trainee.rounds.contribute(trainee.made))
        else:
            while trainee.heard[-1].earlier is None:
                reach(trainee, trainee.round + 1)
            assert trainee.heard[-1].is_dropped, "its inner step since is given up"
        have_taken.wait(GUARD_SECONDS)
        assert state_after(island)[0] == before
        assert torch.equal(island.params.flat(), trainee.global_params()), "no progress is on top"
        return trainee.round, island.outer.digest

    found = run_islands(dict.fromkeys("abc", script), made, model=layered)
    assert found["a"] == found["b"] == found["c"]


def test_an_offer_that_is_withdrawn_makes_no_round_go_back() -> None:
    def script(island: Island) -> list[int | None]:
        trainee = Trainee(island)
        trainee.begin()
        trainee.run(lambda: trainee.round >= 1)
        trainee.rounds.offer(saved(island.outer))
        trainee.rounds.withdraw()
        trainee.run(lambda: trainee.round >= 3)
        return [heard.earlier for heard in trainee.heard]

    made = config(2, wait_for="quorum", quorum=2, inner_steps=4)
    assert set(
        chain.from_iterable(run_islands(dict.fromkeys("ab", script), made, model=layered).values())
    ) == {None}
