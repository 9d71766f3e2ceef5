"""For how many rounds an island takes part in no plan with a reducer that its audits have found at
fault.
"""

from outer.audits.distrust import FORGET_ROUNDS, MAX_ROUNDS, WRONG_ROUNDS, Distrust
from tests.outer.audits.plans import build_plan


def rounds_out(distrust: Distrust, names: str = "abc", last: int = 2 * MAX_ROUNDS) -> int:
    """The first round in which all of these islands may be in a plan again."""
    plan = build_plan(names)
    return next(
        r for r in range(last) if distrust.find(plan.model_copy(update={"round": r})) is None
    )


def test_nobody_is_distrusted_at_first():
    assert Distrust().find(build_plan("abc")) is None


def test_a_wrong_mean_costs_many_rounds_and_the_next_one_more():
    distrust = Distrust()
    distrust.note(0, "b", is_wrong=True)
    assert rounds_out(distrust) == rounds_out(distrust, "ab") == WRONG_ROUNDS
    assert rounds_out(distrust, "ac") == 0
    distrust.note(WRONG_ROUNDS, "b", is_wrong=True)
    assert rounds_out(distrust) == 5 * WRONG_ROUNDS


def test_what_was_not_shown_costs_nothing_once_and_then_more_each_time():
    distrust, found = Distrust(), []
    for _ in range(5):
        distrust.note(0, "b", is_wrong=False)
        found.append(rounds_out(distrust))
    assert found == [0, 2, 4, 8, 16]


def test_of_two_islands_a_link_may_be_at_fault_and_they_go_on():
    distrust = Distrust()
    for _ in range(5):
        distrust.note(0, "b", is_wrong=False)
    assert rounds_out(distrust, "ab") == 0


def test_what_is_long_ago_is_forgotten():
    distrust = Distrust()
    distrust.note(0, "b", is_wrong=True)
    distrust.note(WRONG_ROUNDS + FORGET_ROUNDS, "b", is_wrong=False)
    assert (
        distrust.find(build_plan("abc").model_copy(update={"round": WRONG_ROUNDS + FORGET_ROUNDS}))
        is None
    )
