"""Whom an island leaves out after attempts have failed: accused islands, those whose digest
differs, silent ones.
"""

from dataclasses import replace

import pytest

from outer.agreement.messages import OutcomeQuery, Plan, Status, Vote, VoteReceipt
from outer.agreement.planner import GiveUp
from outer.agreement.rules import Behind
from outer.agreement.state_machine import RoundProtocol
from outer.agreement.suspicions import (
    MAX_AMNESTIES,
    MAX_DISSENTS,
    MAX_TIES,
    ROTATE_AFTER,
    TURN_ATTEMPTS,
    Suspicions,
)
from outer.errors import MessageError
from tests.outer.habits import plain_noes
from tests.outer.lies import new_run, seconds_until
from tests.outer.protocols import WAYS, gathering, node
from tests.outer.signers import public_of, signed_yes
from tests.outer.world import digest_of, ready_of

# -- accusations -----------------------------------------------------------------------------------


def test_an_island_whose_payload_could_not_be_used_is_left_out_of_the_next_attempt():
    a = gathering("a", "bc", ready="bc")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    a.vote(Vote.no(plan, "a", "c sent nan", accused="c"))
    for other in "bc":
        a.receive(other, Vote.no(plan, other, "another island voted no"))
    assert a.conclude(is_late=False) == "abort"
    a.prepare(ready_of(a))
    for other in "bc":
        a.receive(other, ready_of(node(other, "")).model_copy(update={"attempt": 1}))
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b"]


def attempted(a: RoundProtocol) -> Plan:
    """A further plan of the ready island `a` with all others."""
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    return plan


def again(a: RoundProtocol, others: str) -> None:
    """The attempt has failed, and all are ready for the next one."""
    assert a.conclude(is_late=False) == "abort"
    a.prepare(ready_of(a))
    for other in others:
        a.receive(other, ready_of(node(other, "")).model_copy(update={"attempt": a.next_attempt}))


def accuse(a: RoundProtocol, others: str, /, *, of_means: str = "", **accused: str) -> Plan:
    """An attempt that fails because islands, by name, accuse others, those in `of_means` because no
    mean came.
    """
    plan = attempted(a)
    for name in set(others) - accused.keys():
        a.receive(name, Vote.no(plan, name, "another island voted no"))
    for name, other in accused.items():
        vote = Vote.no(
            plan, name, f"{other} sent nan", accused=other, waits_for_means=name in of_means
        )
        if name == "a":
            a.vote(vote)
        else:
            a.receive(name, vote)
    if a.state == "reducing":
        a.vote(Vote.no(plan, "a", "another island voted no"))
    again(a, others)
    return plan


def names_of(decision: object) -> list[str]:
    assert isinstance(decision, Plan)
    return decision.names


def test_an_island_that_accuses_two_of_three_is_left_out_itself():
    a = gathering("a", "bc", ready="bc")
    accuse(a, "bc", c="b")
    accuse(a, "bc", c="a")
    assert names_of(a.try_plan(is_late=False)) == ["a", "b"]


def test_islands_that_took_part_in_no_plan_accuse_nobody():
    a = gathering("a", "bc", ready="bc")
    for accuser, accused in [("x", "b"), ("y", "b"), ("c", "b"), ("z", "a")]:
        a.receive(
            accuser, Vote(plan=digest_of(accuser) * 2, round=0, island=accuser, accused=accused)
        )
    for name in "xyz":
        a.remove(name)
    assert names_of(a.try_plan(is_late=False)) == ["a", "b", "c"]


def test_an_accusation_of_an_island_outside_the_plan_does_not_count():
    a = gathering("a", "bcd", ready="bc")
    plan = a.try_plan(is_late=True)
    assert isinstance(plan, Plan) and "d" not in plan.names
    a.receive("c", Vote.no(plan, "c", "nan", accused="d"))
    a.vote(Vote.no(plan, "a", "another island voted no"))
    again(a, "bcd")
    assert names_of(a.try_plan(is_late=False)) == ["a", "b", "c", "d"]


def test_two_islands_that_accuse_each_other_try_again_together():
    a = gathering("a", "b", ready="b")
    accuse(a, "b", a="b", b="a")
    assert names_of(a.try_plan(is_late=False)) == ["a", "b"]


def test_three_islands_that_accuse_each_other_in_a_ring_try_again_together():
    a = gathering("a", "bc", ready="bc")
    accuse(a, "bc", a="b", b="c", c="a")
    assert names_of(a.try_plan(is_late=False)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "pairs", [{"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}], ids=["pair", "ring"]
)
def test_islands_that_all_accuse_each_other_stop_after_a_few_attempts_and_name_all(
    pairs: dict[str, str],
):
    others = "".join(pairs)[1:]
    a = gathering("a", others, ready=others)
    for _ in range(MAX_AMNESTIES + 1):
        accuse(a, others, **pairs)
    end = a.try_plan(is_late=False)
    assert isinstance(end, GiveUp)
    assert all(f"{name}: " in end.cause for name in pairs)
    assert "checkpoint" in end.cause


def test_of_two_in_four_that_accuse_each_other_one_is_left_out():
    a = gathering("a", "bcd", ready="bcd")
    accuse(a, "bcd", b="c", c="b")
    assert names_of(a.try_plan(is_late=False)) == ["a", "b", "d"]


def test_who_waits_for_means_of_an_island_that_waits_itself_accuses_nobody():
    a = gathering("a", "bcd", ready="bcd")
    accuse(a, "bcd", a="b", d="b", b="c", of_means="ad")
    assert names_of(a.try_plan(is_late=False)) == ["a", "b", "d"]


def test_who_waits_for_means_of_an_island_that_waits_for_nobody_accuses_it():
    a = gathering("a", "bcd", ready="bcd")
    accuse(a, "bcd", a="b", d="b", of_means="ad")
    assert names_of(a.try_plan(is_late=False)) == ["a", "c", "d"]


@pytest.mark.parametrize(("round_number", "out"), [(0, "c"), (1, "b"), (2, "c")])
def test_an_island_from_which_another_withholds_payloads_is_in_every_other_round(
    round_number: int, out: str
):
    plan = attempted(gathering("a", "bc", ready="bc"))
    suspicions = Suspicions()
    suspicions.take_part(plan)
    noes = [
        Vote.no(plan, "a", "no mean came", accused="b", waits_for_means=True),
        Vote.no(plan, "b", "no payload came", accused="c"),
        Vote.no(plan, "c", "no payload came", accused="b"),
    ]
    votes = {(plan.id, vote.island): vote for vote in noes}
    assert suspicions.excluded(round_number, votes).keys() == {out}


def test_an_island_that_was_left_out_takes_part_in_the_next_round():
    a = gathering("a", "bc", ready="bc")
    accuse(a, "bc", b="c")
    assert names_of(attempted(a)) == ["a", "b"]
    a.update_status(Status(round=1, tokens=20, digest="11" * 8))
    a.prepare(ready_of(a))
    for other in "bc":
        a.receive(other, ready_of(a).model_copy(update={"island": other, "key": public_of(other)}))
    assert names_of(a.try_plan(is_late=False)) == ["a", "b", "c"]


# -- digests that differ ---------------------------------------------------------------------------


def differ(a: RoundProtocol, others: str, /, **digests: str) -> Plan:
    """An attempt in which the islands find these digests."""
    plan = attempted(a)
    a.vote(Vote.yes(plan, "a", digests["a"]))
    for name in others:
        if name in digests:
            a.receive(name, signed_yes(plan, name, digests[name]))
    return plan


X, Y, Z = "aa" * 8, "bb" * 8, "cc" * 8


def test_an_island_whose_digest_differs_from_the_majoritys_is_left_out_of_the_next_attempt():
    a = gathering("a", "bc", ready="bc")
    differ(a, "bc", a=X, b=Y, c=X)
    again(a, "bc")
    assert "differs" in a.gathering.excluded["b"] and X[:12] in a.gathering.excluded["b"]
    assert names_of(a.try_plan(is_late=False)) == ["a", "c"]


def test_with_two_digests_the_vote_that_says_which_is_the_majoritys_is_waited_for():
    a = gathering("a", "bc", ready="bc")
    plan = differ(a, "bc", a=X, b=Y)
    assert a.conclude(is_late=False) == "open"
    a.receive("c", signed_yes(plan, "c", Y))
    assert a.conclude(is_late=False) == "abort"


def test_the_minority_finds_out_by_itself_and_waits_for_the_others_state():
    a = gathering("a", "bc", ready="bc")
    differ(a, "bc", a=Y, b=X, c=X)
    again(a, "bc")
    assert a.try_plan(is_late=False) is None
    taken = Status(round=1, tokens=20, digest=Z)
    a.receive("b", taken)
    assert isinstance(a.try_plan(is_late=False), Behind)
    a.update_status(taken)
    a.prepare(ready_of(a))
    for other in "bc":
        a.receive(other, ready_of(a).model_copy(update={"island": other, "key": public_of(other)}))
    assert names_of(a.try_plan(is_late=False)) == ["a", "b", "c"]


def dissent(a: RoundProtocol, others: str, /, **digests: str) -> None:
    """A round in which digests differ, and which the others then commit."""
    differ(a, others, **digests)
    assert a.conclude(is_late=False) == "abort"
    here = a.knowledge.status
    status = Status(round=here.round + 1, tokens=here.tokens + 20, digest=digest_of(here.digest))
    a.update_status(status)
    a.prepare(ready_of(a))
    for other in others:
        a.receive(other, ready_of(a).model_copy(update={"island": other, "key": public_of(other)}))


def test_an_island_whose_digest_differs_in_two_rounds_in_a_row_is_left_out_of_the_next_one():
    a = gathering("a", "bc", ready="bc")
    dissent(a, "bc", a=X, b=Y, c=X)
    dissent(a, "bc", a=X, b=Y, c=X)
    assert names_of(attempted(a)) == ["a", "c"]


def test_an_island_that_differs_from_the_majority_in_three_rounds_stops_and_says_what_to_compare():
    a = gathering("a", "bc", ready="bc")
    for _ in range(MAX_DISSENTS):
        a.suspicions.dissents = {k: replace(v, until=0) for k, v in a.suspicions.dissents.items()}
        dissent(a, "bc", a=Y, b=X, c=X)
    end = a.try_plan(is_late=False)
    assert isinstance(end, GiveUp)
    assert "versions" in end.cause


def test_two_islands_whose_digests_differ_again_and_again_stop_and_print_both():
    a = gathering("a", "b", ready="b")
    for _ in range(MAX_TIES):
        differ(a, "b", a=X, b=Y)
        again(a, "b")
    end = a.try_plan(is_late=False)
    assert isinstance(end, GiveUp)
    assert f"a {X}, b {Y}" in end.cause and "versions" in end.cause


# -- silence ---------------------------------------------------------------------------------------


def silent(a: RoundProtocol, others: str, quiet: str) -> Plan:
    """An attempt whose reduce takes too long on all that vote; `quiet` islands live and do not
    vote.
    """
    plan = attempted(a)
    for name in set(others) - set(quiet):
        a.receive(name, Vote.no(plan, name, "it took too long", is_stalled=True))
        a.receive(name, VoteReceipt(plan=plan.id, outcome="open"))
    a.vote(Vote.no(plan, "a", "it took too long", is_stalled=True))
    assert a.conclude(is_late=False) == "open", "the votes of the others say who is silent"
    assert a.conclude(is_late=True) == "abort"
    a.prepare(ready_of(a))
    for other in others:
        a.receive(other, ready_of(a).model_copy(update={"island": other, "key": public_of(other)}))
    return plan


def test_two_islands_that_join_an_attempt_and_do_nothing_are_left_out_together():
    a = gathering("a", "bcde", ready="bcde")
    silent(a, "bcde", quiet="de")
    assert names_of(attempted(a)) == ["a", "b", "c"]


def test_an_island_that_is_silent_in_two_rounds_in_a_row_is_left_out_of_the_next_one():
    a = gathering("a", "bc", ready="bc")
    for number in (1, 2):
        silent(a, "bc", quiet="c")
        assert names_of(attempted(a)) == ["a", "b"]
        a.update_status(Status(round=number, tokens=20 * number, digest=f"{number}" * 16))
        a.prepare(ready_of(a))
        for other in "bc":
            a.receive(
                other, ready_of(a).model_copy(update={"island": other, "key": public_of(other)})
            )
    assert names_of(attempted(a)) == ["a", "b"]


def test_an_island_that_lives_and_does_not_vote_is_left_out_of_the_next_attempt():
    a = gathering("a", "bc", ready="bc")
    plan = differ(a, "bc", a=X, b=X)
    a.receive("b", VoteReceipt(plan=plan.id, outcome="open"))
    assert a.conclude(is_late=True) == "open"
    assert a.conclude(is_late=True, is_over=True) == "abort"
    a.prepare(ready_of(a))
    for other in "bc":
        a.receive(other, ready_of(node(other, "")).model_copy(update={"attempt": 1}))
    assert names_of(a.try_plan(is_late=False)) == ["a", "b"]


def test_a_planner_that_makes_no_plan_is_passed_over_until_it_makes_one():
    b = gathering("b", "ac", ready="ac")
    assert b.try_plan(is_late=True) is None
    assert b.pass_over(is_late=True) == "a"
    assert names_of(b.try_plan(is_late=False)) == ["a", "b", "c"]
    late = gathering("a", "bc", ready="bc").try_plan(is_late=False)
    assert isinstance(late, Plan)
    b.receive("a", late)
    assert b.suspicions.passed_over == frozenset()


def test_an_island_that_is_left_out_takes_part_again_when_the_others_make_no_plan():
    a = gathering("a", "bc", ready="bc")
    accuse(a, "bc", b="a")
    assert a.try_plan(is_late=False) is None
    assert a.pass_over(is_late=False) == "b"
    assert names_of(a.try_plan(is_late=False)) == ["a", "b", "c"]


# -- islands outside the plan, and floods ----------------------------------------------------------


def test_a_query_of_an_island_outside_the_plan_keeps_nobody_from_committing():
    a = gathering("a", "b", ready="b")
    plan = differ(a, "b", a=X, b=X)
    a.receive("x", OutcomeQuery(plan=plan.id, round=0))
    a.receive("b", VoteReceipt(plan=plan.id, outcome="open"))
    assert a.conclude(is_late=False) == "commit"


def test_a_flood_of_one_islands_votes_leaves_room_for_the_others():
    a = gathering("a", "bc", ready="bc")
    plan = attempted(a)
    with pytest.raises(MessageError, match="too many plans"):
        for number in range(10_000):
            a.receive("c", Vote(plan=f"{number:032x}", round=0, island="c"))
    a.receive("b", signed_yes(plan, "b", X))
    assert (plan.id, "b") in a.vote_table.votes


# -- who makes attempts fail without a cause -------------------------------------------------------


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_who_refuses_all_plans_costs_few_attempts_per_round(ways: dict[str, int], names: str):
    run = new_run(names, {names[-1]: [plain_noes]}, seed=1, quorum=2, **ways)
    rounds = 16
    for number in range(1, rounds + 1):
        assert seconds_until(run, number, 60) < 60
    assert run.num_attempts < 5 * rounds, (
        "all islands together; 7 to 10 per round if it were tried in each"
    )


def test_turns_to_be_left_out_go_by_name_in_even_rounds_and_from_the_end_in_odd_ones():
    suspicions = Suspicions(plans={str(i): ("a", "b", "c") for i in range(ROTATE_AFTER)})
    turns = [suspicions.left_out(ROTATE_AFTER + TURN_ATTEMPTS * i) for i in range(4)]
    assert turns == [{"a"}, {"b"}, {"c"}, {"a"}]
    suspicions.round = 1
    assert [suspicions.left_out(ROTATE_AFTER + TURN_ATTEMPTS * i) for i in range(3)] == [
        {"c"},
        {"b"},
        {"a"},
    ]


def test_of_two_that_fail_each_other_neither_is_left_out_of_two_rounds_in_a_row():
    suspicions = Suspicions()
    for number, missing in ((1, "b"), (2, "c"), (3, "b")):
        suspicions.plans = {str(i): ("a", "b", "c") for i in range(ROTATE_AFTER + 1)}
        suspicions.begin_round(number, set("abc") - {missing}, {})
        assert suspicions.excluded(number, {}) == {}
