"""Observers in the protocol: they take part in a round, contribute nothing and delay nobody."""

import pytest

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Plan, Status
from outer.agreement.rules import OBSERVER_FIELDS, Behind, Rules
from outer.agreement.running.grace import GraceTimer, MissedRounds
from outer.agreement.state_machine import RoundProtocol
from outer.errors import MessageError
from outer.network.deadlines import Deadlines
from tests.outer.explore import agree, explore, forked, walk
from tests.outer.signers import claims_of
from tests.outer.world import START, Budget, World, events, new_world, ready_of

LISTENERS = {"has_observers": True, "quorum": 1}
WHOLE = {"2 islands, nothing wrong": ("ab", Budget())}
BOUNDED = {
    "2 islands, everything once": (
        "ab",
        Budget(crashes=1, failed_reduces=1, dropped=1, duplicated=1, impatient=1),
    ),
    "3 islands, a crash": ("abc", Budget(crashes=1)),
    "3 islands, a lost message, patience runs out": ("abc", Budget(dropped=1, impatient=1)),
}
CRASHES = Budget(crashes=2, failed_reduces=2, duplicated=2, impatient=3)
LOSSES = Budget(crashes=2, failed_reduces=2, duplicated=2, dropped=4)


def gave_nothing(world: World) -> bool:
    """Whether a round without a contributor was committed."""
    return any(
        world.status_of(name).tokens == 0 < world.status_of(name).round for name in world.live
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE)
def test_with_listeners_no_order_of_events_makes_two_results_of_one_round_and_every_history_ends(
    case: str,
) -> None:
    names, budget = WHOLE[case]
    worlds = list(explore(new_world(names, 1, budget, **LISTENERS), 40_000))
    assert 100 < len(worlds) < 40_000, "not all worlds were seen"
    assert not any(forked(world) or gave_nothing(world) for world in worlds)
    ends = [world for world in worlds if not events(world)]
    assert ends and all(world.is_over and agree(world) for world in ends)


@pytest.mark.parametrize("bound", [600, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", BOUNDED)
def test_in_larger_cases_with_listeners_no_order_that_was_tried_makes_two_results(
    case: str, bound: int
) -> None:
    names, budget = BOUNDED[case]
    for world in explore(new_world(names, 1, budget, **LISTENERS), bound):
        assert not forked(world)
        assert not gave_nothing(world)


@pytest.mark.parametrize("num_seeds", [12, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget", [CRASHES, LOSSES], ids=["crashes", "losses"])
@pytest.mark.parametrize("quorum", [1, 2])
def test_whatever_crashes_or_is_lost_the_living_go_on_with_one_history(
    budget: Budget, quorum: int, num_seeds: int
) -> None:
    rules = {"has_observers": True, "quorum": quorum, "below_quorum": "continue"}
    for seed in range(num_seeds):
        world = walk(new_world("abc", 3, budget, **rules), seed)
        assert not forked(world), f"seed {seed}"
        assert world.is_over, f"seed {seed}: the islands are stuck"
        assert agree(world), f"seed {seed}"
        assert not gave_nothing(world), f"seed {seed}"


# -- single steps ----------------------------------------------------------------------------------


def node(name: str, others: str, **rules: object) -> RoundProtocol:
    made = RoundProtocol(
        Knowledge(
            name,
            Rules(**(LISTENERS | rules)),
            Status(round=0, tokens=0, digest=START),
            claims_of(name),
        )
    )  # pyright: ignore[reportArgumentType]
    made.knowledge.add(others)
    return made


def gathering(name: str, giving: str = "", observing: str = "", **rules: object) -> RoundProtocol:
    """An island that gathers and knows the observers and contributors, itself among them."""
    made = node(name, "".join(set(giving + observing) - {name}), **rules)
    made.prepare(ready_of(made, listens=name in observing))
    for other in set(giving + observing) - {name}:
        made.receive(other, ready_of(node(other, ""), listens=other in observing))
    return made


def test_a_round_of_a_quorum_is_planned_with_those_that_listen_whoever_is_the_planner() -> None:
    plan = gathering("a", giving="c", observing="ab").try_plan(is_late=False)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b", "c"]
    assert [ready.island for ready in plan.contributors] == ["c"]


def test_while_nobody_gives_anything_there_is_no_plan_however_late_it_is() -> None:
    assert gathering("a", observing="abc").try_plan(is_late=True) is None


def test_fewer_that_give_than_the_quorum_wait_for_those_that_listen() -> None:
    assert gathering("a", giving="a", observing="bc", quorum=2).try_plan(is_late=True) is None
    assert isinstance(
        gathering("a", giving="ab", observing="c", quorum=2).try_plan(is_late=False), Plan
    )


def test_those_that_listen_are_given_time_until_all_have_something() -> None:
    assert (
        gathering("a", giving="ab", observing="c").try_plan(is_late=False, is_patient=True) is None
    )
    assert isinstance(gathering("a", giving="abc").try_plan(is_late=False, is_patient=True), Plan)


def test_who_gives_waits_for_who_listens_as_long_as_some_of_its_own_inner_steps_take() -> None:
    a = gathering("a", observing="abc", grace_steps=5.0)
    patience = GraceTimer(a, Deadlines(600.0), MissedRounds(a.knowledge))
    patience.update(100.0, woke_at=0.0)
    assert (patience.waited, patience.seconds_left) == (0.0, 0.0), "nobody gives anything yet"
    a.receive("b", ready_of(node("b", "")).model_copy(update={"step_seconds": 2.0}))
    a.receive("c", ready_of(node("c", "")).model_copy(update={"step_seconds": 9.0}))
    patience.update(200.0, woke_at=0.0)
    assert patience.seconds_left == 10.0
    patience.update(204.0, woke_at=0.0)
    assert (patience.waited, patience.seconds_left) == (4.0, 6.0)
    patience.update(211.0, woke_at=0.0)
    assert patience.seconds_left == 0.0
    patience.update(211.0, woke_at=210.0)
    assert patience.seconds_left == 9.0, "while it stood still it could not hear of others"


def test_who_neither_listens_nor_gives_is_waited_for_until_the_grace_is_over() -> None:
    a = gathering("a", giving="a", observing="b")
    a.receive("c", Status(round=0, tokens=0, digest=START))
    assert a.try_plan(is_late=False) is None
    plan = a.try_plan(is_late=True)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b"]


def test_a_plan_that_was_fixed_while_an_island_listened_holds_when_it_has_something_to_give() -> (
    None
):
    a, b = gathering("a", giving="a", observing="b"), gathering("b", giving="a", observing="b")
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    b.contribute(ready_of(b))
    b.receive("a", plan)
    assert b.plan == plan
    assert [ready.island for ready in plan.contributors] == ["a"]


def test_to_give_is_said_at_once_and_nothing_when_the_plan_is_fixed() -> None:
    a, b = gathering("a", giving="a", observing="b"), gathering("b", giving="a", observing="b")
    b.contribute(ready_of(b))
    assert ("a", ready_of(b)) in b.outbox
    plan = a.try_plan(is_late=False)
    late = gathering("b", giving="a", observing="b")
    late.receive("a", plan)  # pyright: ignore[reportArgumentType]
    late.outbox.clear()
    late.contribute(ready_of(late))
    assert late.plan == plan
    assert not late.outbox


def test_who_has_something_to_give_is_not_made_a_listener_by_an_earlier_word_that_comes_late() -> (
    None
):
    a = gathering("a", giving="ab")
    a.receive("b", ready_of(node("b", ""), listens=True))
    plan = a.try_plan(is_late=False)
    assert isinstance(plan, Plan)
    assert len(plan.contributors) == 2


def test_a_plan_that_nobody_gives_anything_to_is_refused() -> None:
    b = gathering("b", observing="ab")
    nothing = [ready_of(node(name, ""), listens=True) for name in "ab"]
    b.receive("a", Plan(round=0, attempt=0, planner="a", participants=nothing))
    assert b.plan is None


def test_in_a_run_that_waits_for_all_nobody_listens() -> None:
    a = gathering("a", giving="ab", has_observers=False)
    with pytest.raises(
        MessageError, match="'b' is an observer, but this run waits for all islands"
    ):
        a.receive("b", ready_of(node("b", ""), listens=True))
    b = gathering("b", giving="ab", has_observers=False)
    asleep = ready_of(b).model_copy(update=OBSERVER_FIELDS)
    b.receive(
        "a", Plan(round=0, attempt=0, planner="a", participants=[ready_of(node("a", "")), asleep])
    )
    assert b.plan is None


def test_who_listens_claims_no_tokens() -> None:
    a = gathering("a", giving="ab")
    with pytest.raises(MessageError, match="'b' observes, but claims 10 tokens"):
        a.receive("b", ready_of(node("b", "")).model_copy(update={"listens": True}))


def test_who_listens_finds_out_that_it_is_behind() -> None:
    a = gathering("a", observing="ab")
    a.receive("b", Status(round=1, tokens=50, digest="bb" * 8))
    assert isinstance(a.try_plan(is_late=False), Behind)
