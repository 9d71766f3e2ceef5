"""An island that comes back takes part in rounds again, however long it takes to get the others'
state.

Without the rules tested here it takes the state of each round and is ready after the next plan,
again and again.
"""

from math import ceil, prod
from pathlib import Path

import pytest

from diloco.config.schema import load_config
from diloco.faults.disturbances import Disturbances
from diloco.planning.mesh.step_plan import build_step_plan, load_island
from diloco.virtual.fleet import VirtualFleet
from diloco.virtual.run import run_virtually
from diloco.virtual.simulate import VirtualRequest, build_run
from inner.measure.param_specs import param_specs
from outer.agreement.running.limits import most_missed

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
ROUNDS, FAULT_ROUND = 13, 5
"""By then the grace follows from measured rounds."""
OWN_SHARE = 0.1
"""Share of a round for an island's own work; the rest are inner steps."""
BACK = f"kill:1@round={FAULT_ROUND},back=3"


def simulate(
    *overrides: str,
    islands: int = 3,
    round_seconds: float = 12.0,
    state_rounds: float = 1.5,
    fault: str = BACK,
) -> VirtualFleet:
    """A run of rounds that take so long without transfers, and whose links bring a whole state in
    so many of them.
    """
    settings = (f"outer.rounds={ROUNDS}", "outer.inner_steps=4", "outer.optimizer.momentum=0.9")
    config = load_config(CONFIG, [*settings, *overrides])
    specs = param_specs(build_step_plan(config.run, load_island(config, 0)).work.sizes)
    bits = 64 * sum(prod(spec.shape) for spec in specs)
    request = VirtualRequest(
        islands=islands,
        step_seconds=str((1 - OWN_SHARE) * round_seconds / config.outer.inner_steps),
        host_seconds=str(OWN_SHARE * round_seconds),
        disturbances=Disturbances(
            faults=(fault,),
            links=(f"{1e-6 * bits / 0.9 / (state_rounds * round_seconds):.6f}mbit,rtt=10ms",),
        ),
    )
    return run_virtually(build_run(config, request))


def rounds_of(fleet: VirtualFleet, index: int) -> list[int]:
    """Rounds that the island's last process has made."""
    return [landed.number for landed in fleet.islands[index].diary.rounds]


def find_round_at(fleet: VirtualFleet, seconds: float) -> int:
    """The round that was under way at this time."""
    return min(landed.number for _, landed in fleet.landed if landed.committed_at >= seconds)


def check_comes_in(fleet: VirtualFleet, index: int, state_rounds: float) -> None:
    """The island takes part in every round from soon after its state can have come."""
    came_in, made = (
        find_round_at(fleet, fleet.islands[index].diary.begun_at),
        rounds_of(fleet, index),
    )
    last = fleet.num_rounds
    assert made and made[0] <= came_in + ceil(state_rounds) + 2
    assert made == list(range(made[0], last))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("islands", "state_rounds", "codec"),
    [
        (2, 3.0, "int8"),
        (2, 3.0, "fp32"),
        (3, 1.5, "fp32"),
        (3, 3.0, "int8"),
        pytest.param(3, 3.0, "fp32", marks=SLOW),
        pytest.param(6, 1.0, "fp32", marks=SLOW),
        pytest.param(6, 3.0, "fp32", marks=SLOW),
    ],
)
def test_an_island_takes_part_soon_after_its_state_has_come(
    islands: int, state_rounds: float, codec: str
) -> None:
    fleet = simulate(f"outer.codec={codec}", islands=islands, state_rounds=state_rounds)
    check_comes_in(fleet, 1, state_rounds)


@pytest.mark.parametrize("islands", [3, 6])
def test_the_same_in_rounds_of_a_second(islands: int) -> None:
    fleet = simulate("outer.codec=int8", islands=islands, round_seconds=1.0, state_rounds=0.8)
    check_comes_in(fleet, 1, 0.8)


def test_an_island_that_joins_takes_part_soon() -> None:
    fleet = simulate(
        "outer.codec=fp32", islands=2, state_rounds=3.0, fault=f"join:@round={FAULT_ROUND}"
    )
    check_comes_in(fleet, 2, 3.0)


def test_an_island_that_was_frozen_takes_part_soon() -> None:
    fleet = simulate(
        "outer.codec=fp32",
        islands=2,
        state_rounds=3.0,
        fault=f"freeze:1@round={FAULT_ROUND},seconds=40",
    )
    made = rounds_of(fleet, 1)
    woken = find_round_at(fleet, fleet.islands[1].machine.frozen_until)
    missed = sorted(set(range(ROUNDS)) - set(made))
    assert missed and missed[-1] <= woken + 4


def test_an_island_takes_part_soon_in_rounds_of_fragments_behind_inner_steps() -> None:
    fragments = ("outer.fragments=2", "outer.delay=1", "outer.codec=int8")
    fleet = simulate(*fragments, islands=2, state_rounds=1.5)
    check_comes_in(fleet, 1, 2 * 1.5)


def test_an_island_whose_inner_step_takes_longer_than_rounds_is_waited_for_after_some() -> None:
    slow = f"slow:1x1.7@round={FAULT_ROUND},seconds=9999"
    fleet = simulate(
        "outer.inner_steps=1", "outer.codec=int8", islands=4, state_rounds=0.1, fault=slow
    )
    made = [number for number in rounds_of(fleet, 1) if number > FAULT_ROUND]
    assert made and made[0] <= FAULT_ROUND + 1 + most_missed(3)
