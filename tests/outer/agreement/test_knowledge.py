"""Claims to be ahead that nobody can make good are not followed, until the island is believed
again.
"""

from outer.agreement.messages import Plan, Status
from outer.agreement.rules import Behind
from outer.agreement.state_machine import RoundProtocol
from tests.outer.protocols import gathering, node
from tests.outer.world import ready_of


def disbelieving(claim: Status) -> RoundProtocol:
    """A ready island in a run of three that does not believe "c"."""
    a = gathering("a", "bc", ready="b")
    a.receive("c", claim)
    a.knowledge.disbelieve("c", claim)
    return a


def test_an_island_whose_state_nobody_can_fetch_is_neither_followed_nor_waited_for():
    a = disbelieving(Status(round=9, tokens=1 << 60, digest="cc" * 8))
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b"]


def test_a_doubted_island_is_not_believed_because_it_claims_still_more():
    a = disbelieving(Status(round=9, tokens=1 << 60, digest="cc" * 8))
    a.receive("c", Status(round=9, tokens=(1 << 60) + 1, digest="dd" * 8))
    assert isinstance(a.try_plan(is_late=False), Plan)


def test_a_doubted_island_that_holds_this_islands_state_takes_part_again():
    a = disbelieving(Status(round=9, tokens=1 << 60, digest="cc" * 8))
    a.receive("c", ready_of(node("c", "")))
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b", "c"]


def test_an_island_that_is_believed_again_is_followed():
    a = disbelieving(Status(round=9, tokens=1 << 60, digest="cc" * 8))
    a.knowledge.believe("c")
    assert isinstance(a.try_plan(is_late=False), Behind)
