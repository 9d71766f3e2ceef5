"""Among many participants the planner passes the votes on, and each commits at its word or by
itself.
"""

import pytest

from outer.agreement.messages import (
    OutcomeQuery,
    OutcomeReply,
    Plan,
    Settled,
    Vote,
    VoteList,
    VoteReceipt,
)
from outer.agreement.state_machine import RoundProtocol
from outer.errors import MessageError
from outer.network.messages import Message
from tests.outer.protocols import node
from tests.outer.world import digest_after, ready_of

NAMES = "abc"


def voting(names: str = NAMES) -> tuple[Plan, dict[str, RoundProtocol]]:
    """Participants of a plan by `a` that have all reduced. What they send is to be taken with
    `taken`.
    """
    islands = {name: node(name, names, direct_islands=0) for name in names}
    for island in islands.values():
        island.prepare(ready_of(island))
    for name in names[1:]:
        islands["a"].receive(name, islands[name].own or ready_of(islands[name]))
    plan = islands["a"].try_plan(is_late=False)
    assert isinstance(plan, Plan)
    for name in names[1:]:
        islands[name].receive("a", plan)
    for island in islands.values():
        island.outbox = []
        island.vote(Vote.yes(plan, island.knowledge.me, digest_after(plan)))
    return plan, islands


def taken(island: RoundProtocol) -> list[tuple[str, Message]]:
    outbox, island.outbox = island.outbox, []
    return outbox


def kinds(messages: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(to, type(message).__name__) for to, message in messages]


def pass_on(islands: dict[str, RoundProtocol], sender: str) -> list[tuple[str, Message | None]]:
    """Deliver what the island sends and its replies. Returns the replies by island."""
    replies = [(to, islands[to].receive(sender, message)) for to, message in taken(islands[sender])]
    for to, reply in replies:
        if reply is not None:
            islands[sender].receive(to, reply)
    return replies


def listed() -> tuple[Plan, dict[str, RoundProtocol]]:
    """Like `voting`, and all have the votes of all."""
    plan, islands = voting()
    for name in "bc":
        pass_on(islands, name)
    assert islands["a"].conclude(is_late=False) == "open"
    pass_on(islands, "a")
    return plan, islands


def test_each_votes_to_the_planner_which_passes_the_list_on() -> None:
    _, islands = voting()
    assert [kinds(islands[name].outbox) for name in NAMES] == [[], [("a", "Vote")], [("a", "Vote")]]
    pass_on(islands, "b")
    assert islands["a"].conclude(is_late=False) == "open"
    assert taken(islands["a"]) == []
    pass_on(islands, "c")
    assert islands["a"].conclude(is_late=False) == "open"
    assert kinds(taken(islands["a"])) == [("b", "VoteList"), ("c", "VoteList")]


def test_nobody_commits_before_all_have_acknowledged_the_list() -> None:
    _, islands = listed()
    assert [islands[name].conclude(is_late=False) for name in "bc"] == ["open", "open"]
    assert islands["a"].conclude(is_late=False) == "open"
    assert kinds(islands["a"].outbox) == [("b", "Settled"), ("c", "Settled")]


def test_the_planner_commits_when_the_first_of_the_others_has() -> None:
    plan, islands = listed()
    islands["a"].conclude(is_late=False)
    settled = Settled(plan=plan.id, round=0)
    reply = islands["b"].receive("a", settled)
    assert reply == VoteReceipt(plan=plan.id, outcome="commit")
    assert islands["a"].conclude(is_late=False) == "open"
    islands["a"].receive("b", reply)
    assert islands["a"].conclude(is_late=False) == "commit"
    assert islands["b"].conclude(is_late=False) == "commit"


def test_what_the_planner_was_told_stands_although_it_is_lost_then() -> None:
    plan, islands = listed()
    islands["b"].receive("a", Settled(plan=plan.id, round=0))
    islands["b"].mark_lost("a")
    assert islands["b"].conclude(is_late=False) == "commit"


def test_settled_without_the_votes_commits_nothing() -> None:
    plan, islands = voting()
    assert islands["b"].receive("a", Settled(plan=plan.id, round=0)) == VoteReceipt(
        plan=plan.id, outcome="open"
    )
    assert islands["b"].conclude(is_late=False) == "open"


def test_only_the_planner_is_believed() -> None:
    plan, islands = listed()
    assert islands["b"].receive("c", Settled(plan=plan.id, round=0)) == VoteReceipt(
        plan=plan.id, outcome="open"
    )
    assert islands["b"].conclude(is_late=False) == "open"


@pytest.mark.parametrize(
    "change",
    [{"signatures": ["00" * 64] * 3}, {"signatures": ["00" * 64] * 2}],
    ids=["forged", "short"],
)
def test_a_list_that_is_not_signed_by_all_is_refused(change: dict[str, list[str]]) -> None:
    plan, islands = voting()
    for name in "bc":
        pass_on(islands, name)
    islands["a"].conclude(is_late=False)
    found = next(message for to, message in taken(islands["a"]) if to == "b")
    assert isinstance(found, VoteList)
    with pytest.raises(MessageError):
        islands["b"].receive("a", found.model_copy(update=change))
    assert islands["b"].vote_table.cast(plan).keys() == {"b"}


def test_votes_go_to_all_when_the_planner_is_slow() -> None:
    _, islands = listed()
    taken(islands["b"])
    assert islands["b"].conclude(is_late=False, is_slow=True) == "open"
    assert kinds(islands["b"].outbox) == [("c", "Vote")], "the planner has acknowledged it"
    pass_on(islands, "b")
    assert islands["b"].conclude(is_late=False) == "commit", (
        "it has the votes of all, and all have its own"
    )


def test_the_others_are_asked_when_the_planner_is_lost() -> None:
    _, islands = listed()
    taken(islands["b"])
    islands["b"].mark_lost("a")
    assert islands["b"].conclude(is_late=False) == "open"
    assert {(to, type(m)) for to, m in islands["b"].outbox} == {("c", Vote), ("c", OutcomeQuery)}


def test_different_digests_are_told_to_all() -> None:
    plan, islands = voting()
    taken(islands["c"])
    islands["c"].vote_table.votes = {}
    islands["c"].vote(Vote.yes(plan, "c", "cc" * 8))
    for name in "bc":
        pass_on(islands, name)
    assert islands["a"].conclude(is_late=False) == "abort"
    pass_on(islands, "a")
    assert [islands[name].conclude(is_late=False) for name in "bc"] == ["abort", "abort"]
    assert islands["b"].suspicions.find_dissenters(islands["b"].vote_table.votes).keys() == {"c"}


def test_a_planner_that_writes_to_all_still_tells_those_that_hold_its_list_before_it_commits() -> (
    None
):
    """Otherwise it could commit and freeze: the others would find it lost, ask each other, and
    abort.
    """
    _, islands = voting()
    for name in "bc":
        pass_on(islands, name)
    assert islands["a"].conclude(is_late=False) == "open"
    lists = taken(islands["a"])
    receipts = [(to, islands[to].receive("a", message)) for to, message in lists]
    assert islands["a"].conclude(is_late=False, is_slow=True) == "open"
    taken(islands["a"])
    for to, receipt in receipts:
        assert receipt is not None
        islands["a"].receive(to, receipt)
    assert islands["a"].conclude(is_late=False, is_slow=True) == "open", "nobody else has committed"
    told = [message for message in taken(islands["a"]) if isinstance(message[1], Settled)]
    assert [to for to, _ in told] == ["b", "c"]
    reply = islands["b"].receive("a", told[0][1])
    assert isinstance(reply, VoteReceipt) and reply.outcome == "commit"
    islands["a"].receive("b", reply)
    assert islands["a"].conclude(is_late=False, is_slow=True) == "commit"


def test_who_has_said_open_is_asked_again_when_another_is_lost() -> None:
    """Two crashes among four: `d` dies, `c` commits with its vote, tells `b` so, and dies before it
    tells `a`.
    """
    plan, islands = voting_directly("abcd")
    a, b, c = (islands[name] for name in "abc")
    for island in (a, b):
        island.mark_lost("d")
    assert a.conclude(is_late=False) == "open"
    a.outbox = [(to, message) for to, message in a.outbox if isinstance(message, OutcomeQuery)]
    (query,) = {id(message): message for _, message in taken(a)}.values()
    reply = b.receive("a", query)
    assert isinstance(reply, OutcomeReply) and reply.outcome == "open"
    a.receive("b", reply)
    assert a.conclude(is_late=False) == "open", "c has not answered"
    assert c.conclude(is_late=False) == "commit"
    assert b.conclude(is_late=False) == "open"
    shown = c.receive("b", query)
    assert isinstance(shown, OutcomeReply) and shown.outcome == "commit"
    b.receive("c", shown)
    assert b.conclude(is_late=False) == "commit"
    a.mark_lost("c")
    assert a.conclude(is_late=False) == "open", "b is asked again"
    assert ("b", query) in taken(a)
    again = b.receive("a", query)
    assert isinstance(again, OutcomeReply)
    a.receive("b", again)
    assert a.conclude(is_late=False) == "commit"
    assert plan.names == ["a", "b", "c", "d"]


def voting_directly(names: str) -> tuple[Plan, dict[str, RoundProtocol]]:
    """Participants that write to each other. All hold all votes and receipts but for those of the
    last, which reach the last but one alone.
    """
    islands = {name: node(name, names) for name in names}
    for island in islands.values():
        island.prepare(ready_of(island))
    first, *others, last = names
    for name in [*others, last]:
        islands[first].receive(name, islands[name].own or ready_of(islands[name]))
    plan = islands[first].try_plan(is_late=False)
    assert isinstance(plan, Plan)
    for name in [*others, last]:
        islands[name].receive(first, plan)
    votes = {}
    for name, island in islands.items():
        island.outbox = []
        island.vote(Vote.yes(plan, name, digest_after(plan)))
        votes[name] = next(message for _, message in taken(island) if isinstance(message, Vote))
    for sender, vote in votes.items():
        for to in names:
            if to != sender and (sender != last or to == others[-1]):
                receipt = islands[to].receive(sender, vote)
                if receipt is not None and (to != last or sender == others[-1]):
                    islands[sender].receive(to, receipt)
    return plan, islands
