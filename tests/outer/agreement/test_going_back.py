"""Which islands go back to an earlier state, whatever crashes or is lost meanwhile."""

import pytest

from outer.agreement.messages import Plan
from tests.outer.explore import agree, explore, forked, walk
from tests.outer.protocols import WAYS, gathering, node
from tests.outer.world import Budget, new_world, ready_of

THEN, BEFORE = "11" * 8, "22" * 8
CRASHES = Budget(crashes=2, failed_reduces=2, duplicated=2, impatient=3)
LOSSES = Budget(crashes=2, failed_reduces=2, duplicated=2, dropped=4)
"""Without `impatient`: a message that is lost for longer than the grace would be a partition."""
SEEDS = [15, pytest.param(1500, marks=pytest.mark.slow)]


def plan_of(offers: dict[str, str | None], **rules: object) -> Plan | None:
    """What the first by name of these islands plans when all are ready."""
    me, *others = sorted(offers)
    a = gathering(me, "".join(others), **rules)
    a.prepare(ready_of(a, earlier=offers[me]))
    for name in others:
        a.receive(name, ready_of(node(name, ""), earlier=offers[name]))
    plan = a.try_plan(is_late=True)
    assert plan is None or isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize(
    "offers", [{"a": THEN, "b": THEN}, {"a": THEN, "b": None, "c": THEN}], ids=str
)
def test_all_take_part_in_going_back_to_what_more_than_half_name(offers: dict[str, str | None]):
    plan = plan_of(offers)
    assert plan is not None and (plan.names, plan.earlier) == (sorted(offers), THEN)


@pytest.mark.parametrize(
    "offers",
    [
        {"a": THEN, "b": None},
        {"a": THEN, "b": None, "c": None},
        {"a": THEN, "b": THEN, "c": None, "d": None},
        {"a": THEN, "b": BEFORE, "c": BEFORE, "d": None},
        {"a": None, "b": None},
    ],
    ids=str,
)
def test_where_no_majority_names_one_state_all_average(offers: dict[str, str | None]):
    plan = plan_of(offers)
    assert plan is not None and (plan.names, plan.earlier) == (sorted(offers), None)


def test_an_island_refuses_a_plan_that_goes_back_to_another_state_than_it_has_named():
    b = gathering("b", "a")
    own = ready_of(b, earlier=THEN)
    b.prepare(own)
    other, claimed = (
        ready_of(node("a", ""), earlier=BEFORE),
        own.model_copy(update={"earlier": BEFORE}),
    )
    b.receive("a", Plan(round=0, attempt=0, planner="a", participants=[other, claimed]))
    assert b.plan is None


@pytest.mark.parametrize("going_back", ["ab", "abc"])
def test_no_order_of_events_makes_two_results_of_a_round_that_goes_back(going_back: str):
    world = new_world("abc", 1, Budget(crashes=1))
    world.earlier = dict.fromkeys(going_back, THEN)
    num_worlds = 0
    for each in explore(world, 2_500):
        num_worlds += 1
        assert not forked(each)
    assert num_worlds == 2_500


@pytest.mark.parametrize("num_seeds", SEEDS)
@pytest.mark.parametrize("budget", [CRASHES, LOSSES], ids=["crashes", "losses"])
@pytest.mark.parametrize(
    "names, going_back", [("abc", "bc"), ("abcd", "abd"), ("abcd", "ac"), ("abcde", "abe")]
)
@pytest.mark.parametrize("ways", WAYS)
def test_whatever_crashes_or_is_lost_the_living_go_on_with_one_history(
    ways: dict[str, int], names: str, going_back: str, budget: Budget, num_seeds: int
):
    for seed in range(num_seeds):
        world = new_world(names, 3, budget, **ways)
        world.earlier = dict.fromkeys(going_back, THEN)
        end = walk(world, seed)
        assert not forked(end), f"seed {seed}"
        assert end.is_over, f"seed {seed}: the islands are stuck"
        assert agree(end), f"seed {seed}"
