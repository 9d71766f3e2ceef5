"""Rounds by the clock: an island makes inner steps for so many seconds, on a clock that the tests
move.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from outer.config import OuterConfig
from outer.network.deadlines import Deadlines
from outer.rounds.pace import Pace
from tests.outer.islands import GUARD_SECONDS, Island, run_islands
from tests.outer.streams import TOKENS, layered

torch.set_num_threads(1)

STEPS = 6
ROUNDS = 3


@dataclass
class Clock:
    """Of one island: stands still until an inner step moves it."""

    step_seconds: float
    seconds: float = 1e6

    def __call__(self) -> float:
        return self.seconds

    def step(self) -> None:
        self.seconds += self.step_seconds


@dataclass(frozen=True)
class Lived:
    """What came of an island's rounds."""

    steps: list[int]
    digests: list[str]
    participants: set[str]
    tokens: int
    params: torch.Tensor


def config(**values: Any) -> OuterConfig:
    made = {"rounds": ROUNDS, "inner_steps": STEPS, "transport": "loopback", "part_elements": 256}
    return OuterConfig(
        **(made | {"start_islands": 2, "quorum": 2, "wait_seconds": GUARD_SECONDS} | values)
    )


def timed(round_seconds: float = STEPS, **values: Any) -> OuterConfig:
    return config(local_steps="timed", round_seconds=round_seconds, **values)


def lived(made: OuterConfig, step_seconds: Mapping[str, float]) -> dict[str, Lived]:
    """The lives of islands whose inner steps take so long on their own clocks."""
    clocks = {name: Clock(seconds) for name, seconds in step_seconds.items()}

    def life(island: Island) -> Lived:
        """What diloco/island.py does, with fake inner steps."""
        outer, landings, steps = island.outer, [], []
        outer.begin()
        while outer.round < made.num_rounds:
            steps.append(0)
            most = outer.inner_steps()
            while True:
                island.train(sum(steps))
                clocks[island.name].step()
                steps[-1] += 1
                cause = outer.interruption(most - steps[-1])
                is_over = steps[-1] == most or bool(cause)
                if outer.in_flight is not None and (is_over or steps[-1] >= made.delay):
                    landings.append(outer.land())
                if is_over:
                    break
            outer.launch(steps[-1] * TOKENS[island.name])
            if made.delay == 0 or outer.round == made.num_rounds:
                landings.append(outer.land())
        reports = [report for landing in landings for report in landing.reports]
        names = {name for report in reports for name in report.participants}
        with outer.global_params():
            params = island.params.flat()
        outer.finish()
        return Lived(
            steps, [report.digest for report in reports], names, outer.position.tokens, params
        )

    return run_islands(dict.fromkeys(step_seconds, life), made, model=layered, clocks=clocks)


@pytest.mark.parametrize("values", [{}, {"fragments": 3, "delay": 1}], ids=["plain", "streaming"])
def test_at_constant_speed_timed_rounds_are_fixed_ones_bit_for_bit(values: dict[str, Any]) -> None:
    speeds = {"a": 1.0, "b": 1.0}
    by_clock = lived(timed(STEPS / values.get("fragments", 1), **values), speeds)
    by_steps = lived(config(**values), speeds)
    for name in speeds:
        assert (
            by_clock[name].digests == by_steps[name].digests
            and len(by_steps[name].digests) >= ROUNDS
        )
        assert by_clock[name].steps == by_steps[name].steps


def test_it_is_the_clock_that_ends_a_round() -> None:
    speeds = {"a": 1.0, "b": 1.0}
    by_clock, by_steps = (
        lived(timed(inner_steps=10 * STEPS), speeds)["a"],
        lived(config(), speeds)["a"],
    )
    assert by_clock.steps == by_steps.steps and torch.equal(by_clock.params, by_steps.params)


def test_an_island_half_as_fast_makes_half_the_steps_and_both_commit() -> None:
    found = lived(timed(inner_steps=10 * STEPS), {"a": 1.0, "b": 2.0})
    assert found["a"].steps == [STEPS] * ROUNDS and found["b"].steps == [STEPS // 2] * ROUNDS
    assert found["a"].digests == found["b"].digests and len(found["a"].digests) == ROUNDS
    assert found["a"].participants == found["b"].participants == {"a", "b"}
    assert found["b"].tokens == ROUNDS * (STEPS * TOKENS["a"] + STEPS // 2 * TOKENS["b"])


@pytest.mark.parametrize("delay", [0, 2])
def test_an_island_makes_at_least_one_step_of_a_round(delay: int) -> None:
    found = lived(timed(delay=delay), {"a": 1.0, "b": 100.0})
    assert found["b"].steps == [1] * ROUNDS and found["a"].digests == found["b"].digests


def test_no_round_has_more_steps_than_the_schedule() -> None:
    assert lived(timed(), {"a": 0.01, "b": 1.0})["a"].steps == [STEPS] * ROUNDS


def test_the_time_of_a_round_begins_with_its_steps() -> None:
    clock = Clock(1.0)
    pace = Pace(timed(3.0), "a", Deadlines(600.0), clock)
    assert pace.begin(STEPS) == STEPS and pace.seconds_left == 3.0
    clock.seconds += 100.0  # Waiting for others, and evaluating.
    assert pace.seconds_left < 0
    pace.begin(STEPS)
    assert pace.seconds_left == 3.0


@pytest.mark.parametrize(
    ("values", "cure"),
    [
        ({"local_steps": "timed"}, "set both or neither"),
        ({"round_seconds": 5.0}, "set both or neither"),
        ({"local_steps": "dynamic", "round_seconds": 5.0}, "set both or neither"),
        ({"local_steps": "timed", "round_seconds": 0.0}, "greater than 0"),
        ({"local_steps": "timed", "round_seconds": float("inf")}, "finite number"),
        (
            {"local_steps": "timed", "round_seconds": 5.0, "wait_for": "quorum"},
            "or wait_for to all",
        ),
        ({"local_steps": "timed", "round_seconds": 5.0, "gossip": {}}, "leave out local_steps"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_with_a_cure(values: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        OuterConfig(**values)
