"""Whole runs on virtual time."""

from dataclasses import astuple
from pathlib import Path

import pytest

from diloco.config.schema import load_config
from diloco.errors import ConfigError
from diloco.faults.disturbances import Disturbances
from diloco.planning.mesh.step_plan import build_step_plan, load_island
from diloco.virtual.fleet import VirtualFleet
from diloco.virtual.island import LandedRound
from diloco.virtual.results import find_ready, measure
from diloco.virtual.run import run_virtually
from diloco.virtual.simulate import VirtualRequest, build_run
from inner.measure.param_specs import param_specs
from outer.cost import round_bytes

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
ROUNDS = 4


def simulate(*overrides: str, islands: int = 4, **flags: object) -> VirtualFleet:
    config = load_config(CONFIG, [f"outer.rounds={ROUNDS}", "outer.inner_steps=2", *overrides])
    asked = {
        name: flags.pop(name)
        for name in ("faults", "links", "storm", "storm_seed")
        if name in flags
    }
    own = {"islands": islands, "step_seconds": "2", "disturbances": Disturbances(**asked), **flags}
    request = VirtualRequest(**own)
    return run_virtually(build_run(config, request))


def rounds_of(fleet: VirtualFleet, index: int) -> list[int]:
    return [landed.number for landed in fleet.islands[index].diary.rounds]


def check_digests(fleet: VirtualFleet) -> None:
    """All islands hold the same state after each round."""
    digests = {(landed.number, landed.digest) for _, landed in fleet.landed}
    assert len(digests) == ROUNDS


def test_eight_islands_commit_every_round_at_the_first_attempt() -> None:
    fleet = simulate(islands=8)
    results = measure(fleet)
    assert (results.num_rounds, results.num_attempts, results.errors) == (ROUNDS, ROUNDS, {})
    assert (results.num_steps_lost, results.num_caught_up) == (0, 0)
    check_digests(fleet)


@pytest.mark.parametrize("islands", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_a_round_takes_an_island_few_messages_however_many_islands_there_are(islands: int) -> None:
    found = measure(simulate("outer.inner_steps=10", islands=islands)).messages
    assert sum(found[kind] for kind in ("ready", "plan", "vote", "votelist", "settled")) <= 12
    assert found["status"] <= 5 * 20, "two calls per second, with their replies, in rounds of 20 s"


def test_the_same_run_comes_out_the_same() -> None:
    def run() -> tuple:
        fleet = simulate(links=("50mbit,rtt=80ms", "1:20mbit"), storm=6.0, storm_seed=3, islands=5)
        results = measure(fleet)
        # A look of an event loop at what is due takes a nanosecond, and what is cancelled at once
        # comes in any order.
        landed = [[_rounded(value) for value in astuple(landed)] for _, landed in fleet.landed]
        return landed, results.messages, results.sent_bytes, _rounded(results.virtual_seconds)

    assert run() == run()


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def test_islands_with_slow_links_take_their_time_and_the_link_is_named() -> None:
    results = measure(simulate("outer.codec=fp32", links=("100mbit", "0:10mbit")))
    fast = measure(simulate("outer.codec=fp32", links=("100mbit",)))
    assert results.terms.reduce > 5 * fast.terms.reduce
    assert results.bottleneck == "the links: payloads"


def test_a_reduce_over_equal_links_takes_the_time_of_its_bytes() -> None:
    changes = "outer.transport=gloo", "outer.codec=fp32", "outer.part_elements=70000"
    config = load_config(CONFIG, changes)
    specs = param_specs(build_step_plan(config.run, load_island(config, 0)).work.sizes)
    (sent,) = round_bytes(config.outer, specs, 4)
    terms = measure(simulate(*changes, links=("10mbit",))).terms
    # 0.94 of the link's rate, and 0.90 of that because several peers share it, as `diloco plan` has
    # it.
    assert terms.reduce == pytest.approx(
        8 * (sent.most_bytes + sent.last_bytes) / (10e6 * 0.94 * 0.90), rel=0.15
    )


def test_the_others_wait_for_a_slow_island() -> None:
    results = measure(simulate(spread=0.5))
    assert results.terms.others > 0.2 and results.bottleneck.startswith("slow islands")
    assert results.utilisation is not None and 0.7 < results.utilisation < 0.95


def test_islands_go_on_without_one_that_dies() -> None:
    fleet = simulate(faults=("kill:1@round=2",))
    assert measure(fleet).errors == {}
    assert [rounds_of(fleet, index) for index in (0, 2, 3)] == [[0, 1, 2, 3]] * 3
    assert rounds_of(fleet, 1) == [0, 1]
    check_digests(fleet)


def test_an_island_that_joins_takes_the_state_and_commits_with_the_others() -> None:
    fleet = simulate(faults=("join:@round=1",))
    assert rounds_of(fleet, 4)[-1] == ROUNDS - 1 and 0 not in rounds_of(fleet, 4)
    assert measure(fleet).messages["part"] > 0
    check_digests(fleet)


def test_an_island_that_was_frozen_goes_on_with_the_others_state() -> None:
    fleet = simulate("outer.rounds=8", faults=("freeze:2@round=1,seconds=12",))
    results = measure(fleet)
    assert results.errors == {} and results.num_caught_up >= 1
    assert rounds_of(fleet, 2)[-1] == 7 and len(rounds_of(fleet, 2)) < 8


def test_a_plan_has_not_waited_for_who_was_ready_after_it() -> None:
    times = {"reduced_at": 8.0, "voted_at": 8.0, "committed_at": 9.0, "landed_at": 9.0}
    landed = [
        LandedRound(3, 10, 1, ready, planned, digest="", **times)
        for ready, planned in ((4.0, 6.0), (5.0, 6.5), (12.0, 7.0))
    ]
    assert find_ready(landed) == {3: 5.0}


def test_rounds_of_fragments_behind_inner_steps_hide_the_links() -> None:
    fragments = ("outer.inner_steps=4", "outer.fragments=2", "outer.delay=1", "outer.codec=fp32")
    hidden = measure(simulate(*fragments, links=("20mbit",)))
    waited = measure(simulate("outer.inner_steps=4", "outer.codec=fp32", links=("20mbit",)))
    assert hidden.num_rounds == 2 * ROUNDS
    assert hidden.utilisation is not None and waited.utilisation is not None
    assert hidden.utilisation > waited.utilisation + 0.05


@pytest.mark.parametrize(
    ("overrides", "flags", "message"),
    [
        ((), {"step_seconds": None}, "give --step-seconds"),
        ((), {"step_seconds": "0"}, "allowed: more than 0"),
        (("outer.codec=topk",), {}, "use another codec"),
        (("outer.wait_for=quorum",), {}, "use all"),
        ((), {"faults": ("cut:0@step=4",)}, "leave out --virtual"),
        ((), {"faults": ("kill:1@round=2,phase=vote",)}, "without phase="),
        ((), {"links": ("9:10mbit",)}, "there is no island 9"),
    ],
)
def test_what_has_no_virtual_form_is_refused(overrides: tuple, flags: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(*overrides, **flags)


@pytest.mark.slow
def test_sixty_four_islands_commit_with_one_dying_and_one_joining() -> None:
    fleet = simulate(islands=64, faults=("kill:9@round=1", "join:@round=1"))
    results = measure(fleet)
    assert (results.num_rounds, results.errors) == (ROUNDS, {})
    assert rounds_of(fleet, 64)[-1] == ROUNDS - 1
    check_digests(fleet)
