"""After a commit the islands write to a coordinator, and to all again when they cannot rely on
it.
"""

from outer.agreement.coordination import Coordination
from outer.agreement.messages import Goodbye, Plan, Ready, Status, Vote
from outer.agreement.rules import Rules
from outer.agreement.state_machine import RoundProtocol
from tests.outer.protocols import node
from tests.outer.world import Budget, events, new_world, ready_of, step

ALL = Rules(direct_islands=0)


def after_a_commit(names: str, **rules: object) -> dict[str, RoundProtocol]:
    """Islands that have committed the first round together and train for the second."""
    world = new_world(names, 1, Budget(), **{"direct_islands": 0} | rules)
    while found := events(world):
        world = step(world, found[-1])
    assert world.is_over
    return world.nodes


def sent(island: RoundProtocol, kind: type) -> set[str]:
    """The islands to which messages of this type are sent. Empties the outbox."""
    outbox, island.outbox = island.outbox, []
    return {to for to, message in outbox if isinstance(message, kind)}


def plan_of(speeds: dict[str, float]) -> Plan:
    readies = [
        ready_of(node(name, "")).model_copy(update={"step_seconds": seconds})
        for name, seconds in speeds.items()
    ]
    return Plan(round=0, attempt=0, planner="a", participants=readies)


def test_in_the_first_round_all_write_to_all() -> None:
    b = node("b", "acd", direct_islands=0)
    b.prepare(ready_of(b))
    assert sent(b, Ready) == {"a", "c", "d"}


def test_after_a_commit_the_others_write_to_the_coordinator_only() -> None:
    islands = after_a_commit("abcd")
    for name in "bcd":
        islands[name].prepare(ready_of(islands[name]))
        assert sent(islands[name], Ready) == {"a"}
    islands["a"].prepare(ready_of(islands["a"]))
    assert sent(islands["a"], Ready) == set()


def test_up_to_four_islands_write_to_all() -> None:
    b = after_a_commit("abcd", direct_islands=4)["b"]
    b.prepare(ready_of(b))
    assert sent(b, Ready) == {"a", "c", "d"}


def test_the_fastest_coordinates_and_an_island_of_unknown_speed_comes_last() -> None:
    coordination = Coordination("a")
    coordination.begin_round(1, plan_of({"a": 0.0, "b": 2.0, "c": 1.0}), ALL)
    assert coordination.crew == ("c", "b", "a")


def test_an_island_that_took_the_state_from_others_writes_to_all() -> None:
    coordination = Coordination("a")
    coordination.begin_round(1, None, ALL)
    assert coordination.coordinator is None


def test_with_observers_all_write_to_all() -> None:
    coordination = Coordination("a")
    coordination.begin_round(
        1, plan_of({"a": 1.0, "b": 2.0}), Rules(direct_islands=0, has_observers=True)
    )
    assert coordination.coordinator is None


def test_the_coordinator_plans_for_all_although_another_is_first_by_name() -> None:
    islands = after_a_commit("abc")
    for island in islands.values():
        island.coordination.crew = ("c", "a", "b")
    for name in "abc":
        islands[name].prepare(ready_of(islands[name]))
    for name in "ab":
        islands["c"].receive(name, islands[name].own or ready_of(islands[name]))
        assert islands[name].try_plan(is_late=False) is None
    plan = islands["c"].try_plan(is_late=False)
    assert isinstance(plan, Plan)
    assert plan.names == ["a", "b", "c"]


def test_the_coordinator_says_how_many_are_ready() -> None:
    islands = after_a_commit("abcd")
    for name in "bc":
        islands[name].prepare(ready_of(islands[name]))
        reply = islands["a"].receive(name, islands[name].own or ready_of(islands[name]))
        islands[name].receive("a", reply or Status(round=0, tokens=0, digest="0" * 16))
    assert islands["b"].coordination.num_ready == 1
    assert islands["c"].coordination.num_ready == 2
    assert islands["a"].receive("d", islands["d"].knowledge.status).num_ready == 2  # pyright: ignore


def test_who_says_how_many_are_ready_and_is_not_the_coordinator_is_not_heard() -> None:
    b = after_a_commit("abcd")["b"]
    b.receive("c", b.knowledge.status.model_copy(update={"num_ready": 9}))
    assert b.coordination.num_ready == 0


def wait_for_the_coordinator() -> RoundProtocol:
    b = after_a_commit("abcd")["b"]
    b.prepare(ready_of(b))
    b.outbox = []
    return b


def test_an_island_writes_to_all_when_the_coordinator_is_lost() -> None:
    b = wait_for_the_coordinator()
    b.mark_lost("c")
    assert sent(b, Ready) == set()
    b.mark_lost("a")
    assert sent(b, Ready) == {"a", "c", "d"}


def test_an_island_writes_to_all_when_the_coordinator_takes_a_state() -> None:
    b = wait_for_the_coordinator()
    b.receive("a", b.knowledge.status.model_copy(update={"is_coming": False}))
    assert sent(b, Ready) == {"a", "c", "d"}


def test_an_island_writes_to_all_when_the_grace_is_over() -> None:
    b = wait_for_the_coordinator()
    assert b.try_plan(is_late=False) is None
    assert sent(b, Ready) == set()
    assert b.try_plan(is_late=True) is None
    assert sent(b, Ready) == {"a", "c", "d"}


def test_an_island_writes_to_all_when_it_is_held_up() -> None:
    b = wait_for_the_coordinator()
    b.knowledge.is_held_up = True
    assert b.try_plan(is_late=False) is None
    assert sent(b, Ready) == {"a", "c", "d"}


def test_a_coordinator_that_said_that_fewer_were_ready_is_found_out() -> None:
    b = wait_for_the_coordinator()
    b.receive("a", b.knowledge.status.model_copy(update={"num_ready": 2}))
    b.knowledge.is_held_up = True
    b.try_plan(is_late=False)
    islands = after_a_commit("abcd")
    b.receive("a", ready_of(islands["a"]))
    assert not b.coordination.slow, "these are the two of which it spoke"
    b.receive("c", ready_of(islands["c"]))
    assert b.coordination.slow.keys() == {"a"}


def test_a_coordinator_that_knows_of_all_and_makes_no_plan_is_passed_over() -> None:
    b = wait_for_the_coordinator()
    assert b.pass_over(is_late=False) is None, "it is not known whether all are ready"
    b.receive("a", b.knowledge.status.model_copy(update={"num_ready": 4}))
    assert b.pass_over(is_late=False) == "a"
    assert sent(b, Ready) == {"a", "c", "d"}


def test_after_a_failed_attempt_all_write_to_all() -> None:
    b = after_a_commit("abcd")["b"]
    b.prepare(ready_of(b).model_copy(update={"attempt": 1}))
    assert sent(b, Ready) == {"a", "c", "d"}


def test_the_next_coordinates_when_the_coordinator_has_left() -> None:
    b = wait_for_the_coordinator()
    b.receive("a", Goodbye(island="a", incarnation="0" * 8, round=1, steps=0))
    assert b.coordination.coordinator == "b"


def test_a_coordinator_that_is_slow_twice_is_not_relied_on_in_the_round_after() -> None:
    coordination, plan = Coordination("a"), plan_of({"a": 2.0, "b": 1.0})
    relied_on = []
    for number in range(4):
        coordination.begin_round(number, plan, ALL)
        relied_on.append(coordination.coordinator)
        if number < 2:
            coordination.find_slow(number)
    assert relied_on == ["b", "b", None, "b"]


def test_a_status_that_follows_from_a_commit_is_presumed_until_it_is_confirmed() -> None:
    b = after_a_commit("abcd")["b"]
    assert b.knowledge.statuses["c"] == b.knowledge.status
    assert "c" in b.knowledge.presumed
    b.receive("c", b.knowledge.status)
    assert "c" not in b.knowledge.presumed


def test_a_no_is_told_to_all() -> None:
    islands = after_a_commit("abc")
    for name in "abc":
        islands[name].prepare(ready_of(islands[name]))
    for name in "bc":
        islands["a"].receive(name, islands[name].own or ready_of(islands[name]))
    plan = islands["a"].try_plan(is_late=False)
    assert isinstance(plan, Plan)
    islands["b"].receive("a", plan)
    islands["b"].vote(Vote.no(plan, "b", "broken"))
    assert sent(islands["b"], Vote) == {"a", "c"}


def meeting(name: str, others: str) -> RoundProtocol:
    """A ready island that has met these others before the first commit, in a run in which two are
    very many.
    """
    made = node(name, others, direct_islands=0, tree_islands=1, max_round=1)
    made.prepare(ready_of(made))
    return made


def test_before_the_first_commit_very_many_write_to_the_first_by_name() -> None:
    assert sent(meeting("b", "acd"), Ready) == {"a"}
    assert sent(meeting("a", "bcd"), Ready) == set()
    assert meeting("a", "bcd").coordination.is_mine


def test_the_first_by_name_coordinates_from_when_it_comes() -> None:
    c = meeting("c", "bd")
    assert sent(c, Ready) == {"b"}
    c.knowledge.add("a")
    c.resend()
    assert sent(c, Ready) == {"a"}


def test_before_the_first_commit_an_island_that_lost_the_coordinator_writes_to_all() -> None:
    b = meeting("b", "acd")
    b.outbox = []
    b.mark_lost("a")
    assert sent(b, Ready) == {"a", "c", "d"}
    b.resend()
    assert sent(b, Ready) == {"a", "c", "d"}


def finished(name: str) -> RoundProtocol:
    """An island that holds the last state of the run, with three others of which it is not known
    yet.
    """
    made, others = (
        meeting(name, "abcd".replace(name, "")),
        [ready_of(node(other, "")) for other in "abcd"],
    )
    plan = Plan(round=0, attempt=0, planner="a", participants=others)
    made.coordination.begin_round(1, plan, made.knowledge.rules)
    made.knowledge.hold(last := Status(round=1, tokens=40, digest="dd" * 8))
    made.knowledge.presume("abcd", last)
    made.state, made.own = "training", None
    return made


def test_at_the_end_the_coordinator_says_when_all_hold_the_last_state() -> None:
    a = finished("a")
    answers = [a.receive(name, a.knowledge.status) for name in "bcd"]
    assert [answer.num_ready for answer in answers if isinstance(answer, Status)] == [0, 0, 1]
    assert a.is_waited_for, "the others have not left"
    for name in "bcd":
        a.receive(name, Goodbye(island=name, incarnation="0" * 8, round=1, steps=0))
    assert not a.is_waited_for


def test_at_the_end_the_others_leave_at_the_word_of_the_coordinator_and_tell_only_it() -> None:
    b = finished("b")
    b.receive("a", b.knowledge.status)
    assert b.is_waited_for
    b.receive("a", b.knowledge.status.model_copy(update={"num_ready": 1}))
    assert not b.is_waited_for
    assert b.find_left_behind() == {"a"}


def test_at_the_end_an_island_that_lost_the_coordinator_asks_all() -> None:
    b = finished("b")
    b.mark_lost("a")
    assert b.is_waited_for
    for name in "cd":
        b.receive(name, b.knowledge.status)
    assert not b.is_waited_for
    assert b.find_left_behind() == {"c", "d"}
