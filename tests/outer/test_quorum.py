"""Rounds that wait for a quorum (`outer.wait_for`), on whole islands: nobody waits for who still trains."""

import threading
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from outer.config import OuterConfig, OuterOptimizerConfig
from tests.outer.islands import GUARD_SECONDS, Island, dies_in, fails_in, run_islands
from tests.outer.paces import Trainee
from tests.outer.streams import Stream, layered

torch.set_num_threads(1)


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {"start_islands": num_islands, "transport": "loopback", "wait_seconds": GUARD_SECONDS}
    return OuterConfig(**{**fields, "rounds": 3, "inner_steps": 4, "wait_for": "quorum", **changes})


def until(trainee: Trainee, number: int) -> None:
    """So many rounds have landed."""
    trainee.run(lambda: trainee.round >= number)


@pytest.mark.parametrize("changes", [{}, {"fragments": 3, "inner_steps": 7}], ids=str)
def test_a_quorum_of_all_makes_the_rounds_of_waiting_for_all_bit_for_bit(changes: dict[str, int]) -> None:
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
