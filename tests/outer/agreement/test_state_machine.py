"""The round protocol under every order of messages, losses, crashes and time-outs, up to a
bound.
"""

from dataclasses import dataclass, field
from functools import cache

import pytest

from outer.agreement.messages import Goodbye, OutcomeQuery, Plan, Status, Vote
from outer.agreement.planner import TooFew
from outer.agreement.rules import DIRECT_ISLANDS, TREE_ISLANDS, Behind
from outer.errors import MessageError
from tests.outer.explore import agree, explore, forked, walk
from tests.outer.protocols import DOWN_A_TREE, PASSED_ON, WAYS, gathering, node
from tests.outer.signers import signed_yes
from tests.outer.world import START, Budget, World, digest_of, events, new_world, ready_of

ONCE = Budget(crashes=1, failed_reduces=1, dropped=1, duplicated=1, impatient=1)
WHOLE = {
    "2 islands, nothing wrong": ("ab", 1, Budget()),
    "2 islands, 2 rounds, nothing wrong": ("ab", 2, Budget()),
    "2 islands, a crash": ("ab", 1, Budget(crashes=1)),
    "2 islands, nothing wrong, passed on": ("ab", 1, Budget(), PASSED_ON),
    "2 islands, a crash, passed on": ("ab", 1, Budget(crashes=1), PASSED_ON),
    "2 islands, a crash, down a tree": ("ab", 1, Budget(crashes=1), PASSED_ON, DOWN_A_TREE),
}
"""Cases whose reachable worlds are all searched."""
SLOW_CASES = ("2 rounds", "2 islands, a crash, down a tree", "4 islands, a loss")


def cases_of(table: dict[str, tuple]) -> list:
    """The cases of a table, of which the long ones are slow."""
    return [
        pytest.param(case, marks=[pytest.mark.slow] * any(name in case for name in SLOW_CASES))
        for case in table
    ]


BOUNDED = {
    "2 islands, everything once": ("ab", 1, ONCE),
    "3 islands, a crash": ("abc", 1, Budget(crashes=1)),
    "3 islands, a failed reduce, a lost message": ("abc", 1, Budget(failed_reduces=1, dropped=1)),
    "4 islands, a crash, patience runs out": ("abcd", 1, Budget(crashes=1, impatient=1)),
    "2 islands, everything once, passed on": ("ab", 1, ONCE, PASSED_ON),
    "3 islands, a crash, passed on": ("abc", 1, Budget(crashes=1), PASSED_ON),
    "3 islands, a crash, down a tree": ("abc", 1, Budget(crashes=1), PASSED_ON, DOWN_A_TREE),
    "4 islands, a loss, a crash, down a tree": (
        "abcd",
        1,
        Budget(crashes=1, dropped=1),
        PASSED_ON,
        DOWN_A_TREE,
    ),
}
CRASHES = Budget(crashes=2, failed_reduces=2, duplicated=2, impatient=3)
LOSSES = Budget(crashes=2, failed_reduces=2, duplicated=2, dropped=4)
"""Without `impatient`: a message that is lost for longer than the grace would be a partition."""
ALARMS = Budget(crashes=1, dropped=2, impatient=2, false_alarms=4)
SEEDS = [60, pytest.param(1500, marks=pytest.mark.slow)]


@dataclass
class Findings:
    """Findings in the worlds of a case."""

    num_worlds: int = 0
    num_ends: int = 0
    wrong: list[World] = field(default_factory=list)
    """Worlds where two islands committed different plans on one state, or one committed a plan with
    a no vote.
    """
    unfinished: list[World] = field(default_factory=list)
    """Worlds where nothing more happens although not all islands have committed the same rounds."""


@cache
def findings(
    bound: int,
    names: str,
    rounds: int,
    budget: Budget,
    direct_islands: int = DIRECT_ISLANDS,
    tree_islands: int = TREE_ISLANDS,
) -> Findings:
    found, ways = (
        Findings(),
        {"direct_islands": direct_islands, "tree_islands": tree_islands, "fan_out": 1},
    )
    for world in explore(new_world(names, rounds, budget, **ways), bound):
        found.num_worlds += 1
        if forked(world) or breaks_a_vote(world):
            found.wrong.append(world)
        if not events(world):
            found.num_ends += 1
            found.unfinished += [] if world.is_over and agree(world) else [world]
    return found


def breaks_a_vote(world: World) -> bool:
    """Whether an island has committed a plan on which a participant voted no."""
    cast = [
        (c, node.vote_table.votes.get((c.plan, name)))
        for c in world.commits
        for name, node in world.nodes.items()
    ]
    return any(
        vote is not None and vote.digest != digest_of(commit.base + commit.plan)
        for commit, vote in cast
    )


@pytest.mark.parametrize("case", cases_of(WHOLE))
def test_no_order_of_events_makes_two_results_of_one_round(case):
    found = findings(20_000, *WHOLE[case])
    assert not found.wrong
    assert 100 < found.num_worlds < 20_000, "not all worlds were seen"


@pytest.mark.parametrize("case", cases_of(WHOLE))
def test_every_history_ends_with_all_rounds_committed_alike(case):
    found = findings(20_000, *WHOLE[case])
    assert found.num_ends
    assert not found.unfinished


@pytest.mark.parametrize("bound", [2_500, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", cases_of(BOUNDED))
def test_in_larger_cases_no_order_that_was_tried_makes_two_results_of_one_round(case, bound):
    found = findings(bound, *BOUNDED[case])
    assert not found.wrong
    assert found.num_worlds == bound


@pytest.mark.parametrize("num_seeds", SEEDS)
@pytest.mark.parametrize("budget", [CRASHES, LOSSES], ids=["crashes", "losses"])
@pytest.mark.parametrize("names", ["abc", "abcd"])
@pytest.mark.parametrize("ways", WAYS)
def test_whatever_crashes_fails_or_is_lost_the_living_go_on_with_one_history(
    ways, names, budget, num_seeds
):
    for seed in range(num_seeds):
        world = walk(new_world(names, 3, budget, **ways), seed)
        assert not forked(world), f"seed {seed}"
        assert world.is_over, f"seed {seed}: the islands are stuck"
        assert agree(world), f"seed {seed}"


@pytest.mark.parametrize(
    "names, bound",
    [("ab", 20_000), ("abc", 2_500), pytest.param("abc", 60_000, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("ways", WAYS)
def test_an_island_that_freezes_has_committed_nothing_that_the_others_do_not(ways, names, bound):
    for world in explore(new_world(names, 1, Budget(freezes=1), **ways), bound):
        assert not forked(world, with_dead=True)


@pytest.mark.parametrize("num_seeds", SEEDS)
@pytest.mark.parametrize("names", ["abc", "abcd"])
@pytest.mark.parametrize("ways", WAYS)
def test_what_a_frozen_island_has_committed_is_what_the_others_commit(ways, names, num_seeds):
    for seed in range(num_seeds):
        world = walk(new_world(names, 3, Budget(freezes=1), **ways), seed, mishap=0.05)
        assert not forked(world, with_dead=True), f"seed {seed}"
        assert world.is_over and agree(world), f"seed {seed}"


@pytest.mark.parametrize("num_seeds", SEEDS)
@pytest.mark.parametrize("names", ["abc", "abcd"])
@pytest.mark.parametrize("ways", WAYS)
def test_after_false_alarms_one_history_survives(ways, names, num_seeds):
    for seed in range(num_seeds):
        world = walk(new_world(names, 3, ALARMS, **ways), seed, mishap=0.3)
        assert world.is_over, f"seed {seed}: the islands are stuck"
        assert agree(world), f"seed {seed}"


def test_two_that_never_signed_together_agree_on_one_of_two_histories_of_equal_length():
    """The second island of a run has died, and the others, of which one is new, have made two
    rounds alone each.
    """
    world = walk(new_world("abc", 3, ALARMS, direct_islands=PASSED_ON), seed=1387, mishap=0.3)
    assert forked(world) and {c.participants for c in world.commits} >= {("a",), ("c",), ("b", "c")}
    assert agree(world)


def test_false_alarms_do_make_two_histories():
    """The search finds forks when there are some; otherwise the test above would prove nothing."""
    worlds = (
        walk(new_world("abcd", 3, Budget(false_alarms=6, impatient=2)), seed, mishap=0.5)
        for seed in range(250)
    )
    assert any(forked(world) for world in worlds)


# -- single steps ----------------------------------------------------------------------------------


def test_the_first_by_name_plans_when_all_are_ready():
    plan = gathering("a", "bc", ready="bc").try_plan(is_late=False)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b", "c"]
    assert gathering("b", "ac", ready="ac").try_plan(is_late=False) is None


def test_who_is_not_ready_is_waited_for_until_the_grace_is_over():
    a = gathering("a", "bc", ready="b")
    assert a.try_plan(is_late=False) is None
    plan = a.try_plan(is_late=True)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b"]


def test_who_is_taking_a_state_is_not_waited_for():
    a = gathering("a", "bc", ready="b")
    a.receive("c", Status(round=0, tokens=0, digest=START, is_coming=False))
    assert isinstance(a.try_plan(is_late=False), Plan)


def test_who_has_said_goodbye_is_not_waited_for():
    a = gathering("a", "bc", ready="b")
    a.receive("c", Goodbye(island="c", incarnation="0" * 8, round=0, steps=3))
    assert isinstance(a.try_plan(is_late=False), Plan)


@pytest.mark.parametrize(
    "policy,is_planned", [("wait", False), ("stop", False), ("continue", True)]
)
def test_below_the_quorum_only_the_policy_continue_plans(policy, is_planned):
    a = gathering("a", "b", quorum=2, below_quorum=policy)
    a.receive("b", Status(round=0, tokens=0, digest=START))
    a.mark_lost("b")
    assert isinstance(a.try_plan(is_late=True), Plan) == is_planned


def test_the_history_with_more_tokens_survives_whatever_its_round():
    a = gathering("a", "bc")
    a.receive("b", Status(round=2, tokens=50, digest="bb" * 8))
    a.receive("c", Status(round=1, tokens=90, digest="cc" * 8))
    behind = a.try_plan(is_late=False)
    assert behind is not None
    assert behind.donors == ("c",)  # pyright: ignore[reportAttributeAccessIssue]


COMMITTED = Status(round=1, tokens=50, digest=START)


def test_among_equal_histories_the_one_held_by_more_survives():
    a = node("a", "bc")
    a.update_status(COMMITTED)
    a.prepare(ready_of(a))
    for other in "bc":
        a.receive(other, COMMITTED.model_copy(update={"digest": "bb" * 8}))
    behind = a.try_plan(is_late=True)
    assert behind.donors == ("b", "c")  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def test_the_majority_is_not_settled_before_all_who_live_are_ready():
    a, b, c = (node(name, set("abc") - {name}) for name in "abc")
    for each in (a, b, c):
        each.update_status(
            COMMITTED if each is a else COMMITTED.model_copy(update={"digest": "bb" * 8})
        )
    a.prepare(ready_of(a))
    a.receive("b", ready_of(b))
    assert a.try_plan(is_late=False) is None
    a.receive("c", ready_of(c))
    assert isinstance(a.try_plan(is_late=False), Behind)


def test_before_the_first_commit_no_state_survives_another():
    a = gathering("a", "bc", start_islands=2)
    for other in "bc":
        a.receive(other, Status(round=0, tokens=0, digest="bb" * 8))
    assert a.try_plan(is_late=True) == TooFew(1, 2, is_start=True)


def test_an_island_that_is_behind_refuses_plans():
    a, b = gathering("a", "b", ready="b"), gathering("b", "a", ready="a")
    plan = b.try_plan(is_late=True) or a.try_plan(is_late=True)
    assert isinstance(plan, Plan)
    b.receive("c", Status(round=1, tokens=50, digest="cc" * 8))
    assert isinstance(b.try_plan(is_late=False), Behind)
    b.receive("a", plan)
    assert b.plan is None
    assert b.vote_table.votes[plan.id, "b"].digest is None


def test_start_islands_are_waited_for_before_the_first_round_only():
    a = gathering("a", "b", ready="b", start_islands=3)
    too_few = a.try_plan(is_late=True)
    assert isinstance(too_few, TooFew)
    assert (too_few.present, too_few.needed, too_few.is_start) == (2, 3, True)
    later = gathering("a", "", start_islands=3)
    later.update_status(Status(round=1, tokens=10, digest=START))
    later.prepare(ready_of(later))
    assert isinstance(later.try_plan(is_late=False), Plan)


@pytest.mark.parametrize("theirs,is_followed", [("aa", True), ("cc", False)])
def test_among_as_many_the_lower_digest_survives(theirs, is_followed):
    a = gathering("a", "b")
    a.update_status(Status(round=1, tokens=50, digest="bb" * 8))
    a.receive("b", Status(round=1, tokens=50, digest=theirs * 8))
    assert isinstance(a.knowledge.behind(is_settled=True), Behind) == is_followed


def test_whoever_was_asked_does_not_commit_on_votes_alone():
    a = gathering("a", "b", ready="b")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    a.vote(Vote.yes(plan, "a", "11" * 8))
    a.receive("b", OutcomeQuery(plan=plan.id, round=0))
    a.receive("b", signed_yes(plan, "b", "11" * 8))
    assert a.conclude(is_late=False) == "open"


def test_whoever_took_a_participant_for_lost_does_not_commit_on_votes_alone():
    a = gathering("a", "b", ready="b")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    a.vote(Vote.yes(plan, "a", "11" * 8))
    a.mark_lost("b")
    a.receive("b", signed_yes(plan, "b", "11" * 8))
    assert a.conclude(is_late=False) == "open"


def test_a_plan_that_was_asked_about_before_it_came_is_refused():
    a, b = gathering("a", "b", ready="b"), gathering("b", "a", ready="a")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    b.receive("a", OutcomeQuery(plan=plan.id, round=0))
    b.receive("a", plan)
    assert b.plan is None
    assert (to_a := b.outbox[-1])[0] == "a"
    assert isinstance(to_a[1], Vote)
    assert to_a[1].digest is None


def test_votes_for_another_plan_of_the_same_attempt_do_not_count():
    a = gathering("a", "b", ready="b")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    a.vote(Vote.yes(plan, "a", "11" * 8))
    a.receive("b", Vote(plan="f" * 32, round=0, island="b", digest="11" * 8))
    assert a.conclude(is_late=False) == "open"


def test_nobody_speaks_for_another_island():
    a = gathering("a", "b")
    with pytest.raises(MessageError, match="'b' sends a message in the name of 'c'"):
        a.receive("b", ready_of(node("c", "")))


def test_claims_of_more_tokens_than_a_round_has_are_refused():
    a = gathering("a", "b", max_tokens=5)
    with pytest.raises(MessageError, match="'b' claims 10 tokens, a round has at most 5"):
        a.receive("b", ready_of(node("b", "")))


def test_claims_of_a_round_beyond_the_run_are_refused():
    a = gathering("a", "b", max_round=4)
    with pytest.raises(MessageError, match="'b' claims round 5"):
        a.receive("b", Status(round=5, tokens=99, digest="bb" * 8))


def test_a_flood_of_votes_does_not_fill_memory():
    a = gathering("a", "b")
    with pytest.raises(MessageError, match="too many plans"):
        for number in range(10_000):
            a.receive("b", Vote(plan=f"{number:032x}", round=0, island="b"))
