"""Numbers of attempts: a liar cannot use them up, whatever it claims."""

import pytest

from outer.agreement.messages import MAX_ATTEMPT, Plan, Status, Vote
from outer.agreement.rules import MAX_AHEAD
from outer.errors import MessageError
from tests.outer.protocols import gathering, node
from tests.outer.world import START, ready_of

FAR = MAX_ATTEMPT - 1


def test_a_ready_message_for_a_far_attempt_is_refused():
    honest, liar = gathering("b", "ac"), ready_of(node("c", ""))
    with pytest.raises(MessageError, match=f"attempt {FAR} of 'c', and this island's next is 0"):
        honest.receive("c", liar.model_copy(update={"attempt": FAR}))


def test_a_status_with_a_far_attempt_renews_nothing():
    honest = gathering("b", "ac")
    honest.receive("c", Status(round=0, tokens=0, digest=START, attempt=FAR))
    assert honest.own is not None and honest.own.attempt == 0


def test_statuses_move_an_attempt_no_further_than_the_limit_however_many_come():
    honest = gathering("b", "ac")
    for attempt in range(0, 10 * MAX_AHEAD, MAX_AHEAD // 2):
        honest.receive("c", Status(round=0, tokens=0, digest=START, attempt=attempt))
    assert honest.own is not None and honest.own.attempt == MAX_AHEAD


@pytest.mark.parametrize("is_own_far", [True, False])
def test_a_refused_plan_uses_up_one_attempt_at_most(is_own_far):
    honest = gathering("b", "ac", "c")
    assert honest.own is not None
    liar, own = ready_of(node("a", "")).model_copy(update={"attempt": FAR}), honest.own
    claimed = own.model_copy(update={"attempt": FAR}) if is_own_far else own
    plan = Plan(round=0, attempt=FAR, planner="a", participants=[liar, claimed])
    honest.outbox = []
    honest.receive("a", plan)
    votes = [message for _, message in honest.outbox if isinstance(message, Vote)]
    assert votes and all(vote.digest is None for vote in votes), "it says no"
    assert honest.next_attempt == 1


def test_a_plan_for_another_attempt_than_its_participants_name_is_refused():
    honest = gathering("b", "ac", "a")
    assert honest.own is not None
    plan = Plan(round=0, attempt=7, planner="a", participants=[ready_of(node("a", "")), honest.own])
    honest.receive("a", plan)
    assert honest.plan is None and honest.next_attempt == 1
