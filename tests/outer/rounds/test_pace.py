"""How many inner steps an island makes beside others that say how fast they are."""

import pytest

from outer.agreement.messages import Plan, Ready
from outer.config import OuterConfig
from outer.network.deadlines import Deadlines
from outer.rounds.pace import MOST_FASTER, Pace


def steps_beside(own: float, *others: float) -> int:
    """Of 500 steps, those that island a makes after a plan with these step times."""
    seconds = {"a": own} | {f"b{number}": each for number, each in enumerate(others)}
    pace = Pace(OuterConfig(local_steps="dynamic"), "a", Deadlines(3.0))
    plan = Plan(
        round=0,
        attempt=0,
        planner="a",
        participants=[ready(name, each) for name, each in seconds.items()],
    )
    pace.observe_commit(plan, now=0.0)
    return pace.of(500)


def ready(name: str, step_seconds: float) -> Ready:
    fields = {
        "island": name,
        "incarnation": "0" * 8,
        "key": "0" * 64,
        "round": 0,
        "attempt": 0,
        "digest": "0" * 16,
    }
    numbers = {"tokens": 1, "weight": 1, "base_tokens": 0, "step_seconds": step_seconds}
    addresses = {"carriers": [(0, 1)], "transport_addresses": ["t"], "control_addresses": ["c"]}
    return Ready(**fields, **numbers, **addresses)


def test_an_island_that_is_four_times_as_slow_makes_a_quarter_of_the_steps() -> None:
    assert (steps_beside(1.0, 0.25), steps_beside(0.25, 1.0)) == (125, 500)


@pytest.mark.parametrize("claim", [1e-300, 1e-9, 0.001])
@pytest.mark.parametrize("honest", [(1.0,), (1.0, 1.0), (1.0, 2.0, 1.0)])
def test_an_island_that_says_it_is_beyond_what_is_plausible_costs_the_others_no_more(
    claim: float, honest: tuple[float, ...]
) -> None:
    assert steps_beside(honest[0], *honest[1:], claim) >= int(500 / MOST_FASTER)
