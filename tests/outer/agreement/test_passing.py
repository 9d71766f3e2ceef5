"""A plan and the list of its votes are passed on from island to island, and nobody has to be
believed for it.
"""

from typing import TypeVar

import pytest

from outer.agreement.coordination import PlanNotice, PlanQuery, find_branches
from outer.agreement.messages import Plan, Vote, VoteList, VoteReceipt
from outer.agreement.rules import Rules
from outer.agreement.state_machine import RoundProtocol
from outer.errors import MessageError
from outer.network.messages import Message
from tests.outer.protocols import WAYS, node
from tests.outer.world import digest_after, ready_of

TREE = WAYS[-1].values[0]
NAMES = "abcd"
M = TypeVar("M", bound=Message)


def planned() -> tuple[Plan, dict[str, RoundProtocol]]:
    """A plan of all that `a` has made, and the islands, each passing on to the next by name."""
    islands = {name: node(name, NAMES, **TREE) for name in NAMES}
    for island in islands.values():
        island.prepare(ready_of(island))
    for name in NAMES[1:]:
        islands["a"].receive(name, islands[name].own or ready_of(islands[name]))
    for island in islands.values():
        island.outbox = []
    plan = islands["a"].try_plan(is_late=False)
    assert isinstance(plan, Plan)
    return plan, islands


def taken(island: RoundProtocol, kind: type[M]) -> dict[str, M]:
    """The messages of this type that the island sends, by receiver. Empties its outbox."""
    outbox, island.outbox = island.outbox, []
    return {to: message for to, message in outbox if isinstance(message, kind)}


def voting() -> tuple[Plan, dict[str, RoundProtocol], VoteList]:
    """All have the plan and have voted, and `a` has made this list of their votes."""
    plan, islands = planned()
    for name in NAMES[1:]:
        islands[name].receive("a", plan)
    for name in reversed(NAMES):
        islands[name].vote(Vote.yes(plan, name, digest_after(plan)))
        for vote in taken(islands[name], Vote).values():
            islands["a"].receive(name, vote)
    assert islands["a"].conclude(is_late=False) == "open"
    found = taken(islands["a"], VoteList)
    assert found.keys() == {"b"}
    return plan, islands, found["b"]


@pytest.mark.parametrize("fan_out", [1, 3, 8])
def test_each_participant_gets_it_from_one_other(fan_out: int) -> None:
    names = [f"island-{number:03}" for number in range(100)]
    plan = planned()[0]
    participants = [plan.participants[0].model_copy(update={"island": name}) for name in names]
    plan = Plan(round=0, attempt=0, planner=names[7], participants=participants)
    rules = Rules(tree_islands=0, fan_out=fan_out)
    reached = [name for me in names for name in find_branches(plan, me, rules)]
    assert sorted(reached) == sorted({*names} - {names[7]})
    assert max(len(find_branches(plan, me, rules)) for me in names) == fan_out


def test_few_participants_get_it_from_the_planner() -> None:
    plan = planned()[0]
    assert find_branches(plan, "a", Rules(tree_islands=4)) == {"b", "c", "d"}
    assert find_branches(plan, "b", Rules(tree_islands=4)) == frozenset()


def test_the_planner_says_to_all_which_plan_comes_and_sends_it_to_its_branches() -> None:
    plan, islands = planned()
    outbox = islands["a"].outbox
    assert {
        to for to, message in outbox if isinstance(message, PlanNotice) and message.plan == plan.id
    } == {*"bcd"}
    assert {to for to, message in outbox if isinstance(message, Plan)} == {"b"}


def test_a_plan_that_was_passed_on_is_accepted_and_passed_on_further() -> None:
    plan, islands = planned()
    islands["c"].receive("a", PlanNotice(plan=plan.id, round=0))
    islands["c"].receive("b", plan)
    assert islands["c"].plan == plan
    assert taken(islands["c"], Plan) == {"d": plan}


def test_a_plan_that_overtakes_its_notice_waits_for_it() -> None:
    plan, islands = planned()
    islands["c"].receive("b", plan)
    assert islands["c"].plan is None and not islands["c"].outbox
    islands["c"].receive("a", PlanNotice(plan=plan.id, round=0))
    assert islands["c"].plan == plan


def test_a_plan_is_not_believed_that_its_planner_did_not_make() -> None:
    plan, islands = planned()
    islands["c"].receive("a", PlanNotice(plan=plan.id, round=0))
    islands["c"].receive("b", PlanNotice(plan="0" * 32, round=0))
    other = Plan(round=0, attempt=0, planner="a", participants=plan.participants[:3])
    islands["c"].receive("b", other)
    assert islands["c"].plan is None and not islands["c"].outbox
    islands["c"].receive("b", plan)
    assert islands["c"].plan == plan


def test_a_plan_that_was_kept_back_is_asked_for_and_the_planner_sends_it() -> None:
    plan, islands = planned()
    islands["a"].outbox = []
    islands["d"].receive("a", PlanNotice(plan=plan.id, round=0))
    islands["d"].resend()
    assert not taken(islands["d"], PlanQuery), "it may be on its way"
    islands["d"].resend()
    assert taken(islands["d"], PlanQuery) == {"a": PlanQuery(plan=plan.id)}
    islands["a"].receive("d", PlanQuery(plan=plan.id))
    assert taken(islands["a"], Plan) == {"d": plan}
    islands["d"].receive("a", plan)
    islands["d"].resend()
    assert not taken(islands["d"], PlanQuery)


def test_a_list_is_passed_on_and_acknowledged_to_the_planner() -> None:
    plan, islands, votes = voting()
    assert islands["c"].receive("b", votes) == VoteReceipt(plan=plan.id, outcome="open")
    outbox = dict(islands["c"].outbox)
    assert outbox == {"d": votes, "a": VoteReceipt(plan=plan.id, outcome="open")}
    assert islands["a"].vote_table.pending(plan) == {*NAMES}
    islands["a"].receive("c", VoteReceipt(plan=plan.id, outcome="open"))
    assert "c" not in islands["a"].vote_table.pending(plan)


def test_a_list_goes_down_the_tree_once() -> None:
    _, islands, votes = voting()
    islands["c"].receive("b", votes)
    islands["c"].outbox = []
    islands["c"].receive("a", votes)
    assert islands["c"].outbox == []


def test_a_list_with_a_forged_vote_is_refused_whoever_passes_it_on() -> None:
    plan, islands, votes = voting()
    forged = votes.model_copy(update={"signatures": ["00" * 64, *votes.signatures[1:]]})
    with pytest.raises(MessageError, match="'b' forwards a vote that 'a' has not signed"):
        islands["c"].receive("b", forged)
    assert islands["c"].vote_table.cast(plan).keys() == {"c"} and not islands["c"].outbox


def test_the_planner_sends_a_list_itself_that_was_kept_back() -> None:
    _, islands, votes = voting()
    islands["a"].resend()
    assert taken(islands["a"], VoteList) == {"b": votes}, "the others may get it from each other"
    islands["a"].resend()
    assert taken(islands["a"], VoteList) == {"b": votes, "c": votes, "d": votes}
