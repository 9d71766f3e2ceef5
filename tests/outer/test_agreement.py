"""Islands agree on who takes part in a round and on what came of it, whoever dies, freezes or leaves when."""

import asyncio
import logging

import pytest

from outer.agreement import FROZEN_SECONDS, GOODBYE_SECONDS, PING_SECONDS, WARN_SECONDS, BehindError
from outer.deadlines import FLOORS, MAX_FIRST_SECONDS
from outer.errors import InputError, MessageError, PoisonError, QuorumError
from outer.membership.loopback import LoopbackMessenger
from outer.rounds import Plan, Standing, no, parse, yes
from outer.transports.base import Endpoint
from outer.transports.loopback import Hub
from tests.outer.leaders import (
    START,
    Fault,
    Gone,
    Leader,
    die,
    fail,
    freeze,
    leaders,
    now,
    run,
    stand_still,
    together,
    until,
    wake,
)

OTHER = "bb" * 16


def plans_of(results: list) -> list[tuple[int, list[str], bool]]:
    """(attempt, participants, committed) of each; a failure is raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [(plan.attempt, plan.names, is_committed) for plan, is_committed in results]


def split(islands: list[Leader], name: str) -> tuple[Leader, list[Leader]]:
    """The island of this name, and the others."""
    return next(i for i in islands if i.name == name), [i for i in islands if i.name != name]


# -- plan and commit ------------------------------------------------------------------------------------------


def test_islands_that_are_ready_commit_together() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        results = await together(c.attempt(), a.attempt(), b.attempt())
        assert plans_of(results) == [(0, ["a", "b", "c"], True)] * 3
        assert a.digest == b.digest == c.digest != START

    run(test)


def test_one_island_alone_commits() -> None:
    async def test() -> None:
        (a,) = await leaders("a")
        assert plans_of(await together(a.attempt())) == [(0, ["a"], True)]

    run(test)


def test_many_rounds_commit_in_one_group() -> None:
    async def test() -> None:
        islands = await leaders("abc", start_islands=3)
        epochs = set()
        for round_number in range(5):
            results = await together(*(i.attempt() for i in islands))
            assert plans_of(results) == [(0, ["a", "b", "c"], True)] * 3
            assert {i.round for i in islands} == {round_number + 1}
            epochs |= {i.attempts.epoch for i in islands}
        assert len(epochs) == 1, "connected once, in the first round"

    run(test)


def test_islands_of_unequal_numbers_of_ranks_commit_together() -> None:
    async def test() -> None:
        (a,) = await leaders("a", start_islands=2, num_ranks=2)
        (b,) = await leaders("b", a.hub, start_islands=2)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2
        assert a.digest == b.digest

    run(test)


def test_start_islands_are_waited_for() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=3)
        early = asyncio.gather(a.attempt(), b.attempt())
        await until(lambda: a.hears("b")() and b.hears("a")())
        (c,) = await leaders("c", a.hub, start_islands=3)
        assert plans_of([await c.attempt(), *await early]) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


def test_a_live_island_that_is_not_ready_is_waited_for() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        early = asyncio.gather(a.attempt(), b.attempt())
        await until(c.hears("ab"))
        await asyncio.sleep(100)
        assert plans_of([await c.attempt(), *await early]) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


def test_an_island_that_is_alive_but_late_is_left_out_after_the_grace() -> None:
    async def test() -> None:
        a, b, _ = await leaders("abc", wait_seconds=20.0)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2
        assert 20 <= now() < 23

    run(test)


def test_told_is_called_once_the_others_can_know() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        seen = []
        running = asyncio.create_task(b.attempt())
        plan = await a.agreement.plan(a.ready(), lambda: seen.append("ready"))
        await a.agreement.decide(no(plan, "a", "disk full"), lambda: seen.append("voted"))
        await running
        assert seen == ["ready", "voted"]

    run(test)


# -- too few islands ------------------------------------------------------------------------------------------


def test_a_run_that_its_first_islands_do_not_come_to_ends() -> None:
    async def test() -> None:
        (a,) = await leaders("a", wait_seconds=20.0, start_islands=2)
        with pytest.raises(QuorumError, match="round 0: 1 of 2 islands came within 2. s; outer.start_islands"):
            await a.attempt()

    run(test)


def test_below_the_quorum_wait_waits_and_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        (a,) = await leaders("a", quorum=2, wait_seconds=5.0)
        early = asyncio.create_task(a.attempt())
        await asyncio.sleep(1.5 * WARN_SECONDS)
        (b,) = await leaders("b", a.hub, quorum=2)
        assert plans_of([await b.attempt(), await early]) == [(0, ["a", "b"], True)] * 2

    run(test)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0] == "round 0: BELOW QUORUM: 1 of 2 islands came; waiting for the others"


def test_below_the_quorum_continue_goes_on_and_says_so_in_every_round(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        (a,) = await leaders("a", quorum=2, below_quorum="continue")
        for _ in range(2):
            assert plans_of([await a.attempt()]) == [(0, ["a"], True)]

    run(test)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [w[: w.index(";")] for w in warnings] == [f"round {r}: BELOW QUORUM: 1 of 2 islands" for r in (0, 1)]


def test_below_the_quorum_stop_ends_the_island_after_the_grace() -> None:
    async def test() -> None:
        (a,) = await leaders("a", quorum=2, below_quorum="stop", wait_seconds=20.0)
        with pytest.raises(QuorumError, match="round 0: 1 of outer.quorum 2 islands .* outer.below_quorum is 'stop'"):
            await a.attempt()
        assert now() >= 20

    run(test)


# -- abort ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["in_reduce", "before_vote"])
@pytest.mark.parametrize("name", "abc")
def test_one_islands_failure_aborts_everywhere_and_the_next_attempt_commits(moment: str, name: str) -> None:
    async def test() -> None:
        islands = await leaders("abc", start_islands=3)
        faults = [{moment: fail} if i.name == name else {} for i in islands]
        first = await together(*(i.attempt(**f) for i, f in zip(islands, faults, strict=True)))
        assert plans_of(first) == [(0, ["a", "b", "c"], False)] * 3
        assert {i.digest for i in islands} == {START}
        second = await together(*(i.attempt() for i in islands))
        assert plans_of(second) == [(1, ["a", "b", "c"], True)] * 3

    run(test)


def test_an_abort_in_a_lasting_group_makes_all_connect_anew() -> None:
    async def test() -> None:
        islands = await leaders("abc", start_islands=3)
        await together(*(i.attempt() for i in islands))
        # a and b have finished their reduce when c says no: their side of the group is whole, c's is not.
        faults: list[Fault | None] = [None, None, fail]
        aborted = await together(*(i.attempt(before_vote=f) for i, f in zip(islands, faults, strict=True)))
        assert plans_of(aborted) == [(0, ["a", "b", "c"], False)] * 3
        assert plans_of(await together(*(i.attempt() for i in islands))) == [(1, ["a", "b", "c"], True)] * 3

    run(test)


def test_a_refused_plan_in_a_lasting_group_leaves_nobody_behind() -> None:
    async def test() -> None:
        islands = a, b, c = await leaders("abc", start_islands=3)
        await together(*(i.attempt() for i in islands))
        # c gives its part in this round's first attempts to a plan that the others have not seen.
        early = asyncio.gather(a.attempt_until_committed(), b.attempt_until_committed())
        await until(c.hears("ab"))
        c.protocol.used["c"] = 1, 4
        ready = c.ready().model_copy(update={"attempt": 2})
        await c.tell(a, ready)
        plans = [await c.attempt_until_committed(), *await early]
        assert [p.names for p in plans] == [["a", "b", "c"]] * 3
        assert plans[0].attempt >= 5

    run(test)


def test_a_no_ends_a_running_reduce_at_once() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        running = asyncio.gather(a.attempt(), b.attempt())
        plan = await c.plan()
        # c neither connects nor leaves: the others could wait for it until their deadline, ten minutes.
        started = now()
        assert not await c.agreement.decide(no(plan, "c", "out of memory"))
        assert plans_of(await running) == [(0, ["a", "b", "c"], False)] * 2
        assert now() - started < PING_SECONDS

    run(test)


def test_a_no_reaches_the_ranks_that_do_not_lead() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2, num_ranks=2)
        plans = await asyncio.gather(a.plan(), b.plan())
        # b's second rank has begun; its leader has not, and passes nothing on.
        second = asyncio.create_task(b._reduce(plans[1], 1))
        await a.agreement.decide(no(plans[0], "a", "out of memory"))
        (error,) = await together(second)
        assert str(error) == "island 'a': out of memory"
        assert now() < 2 * PING_SECONDS

    run(test)


def test_a_no_of_an_island_outside_of_the_plan_changes_nothing() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        q = Leader(a.hub, "q")

        plans = await asyncio.gather(a.plan(), b.plan())
        for island in (a, b):
            await q.tell(island, no(plans[0], "q", "boo"))
        digests = await asyncio.gather(*(i.reduce(p) for i, p in zip((a, b), plans, strict=True)))
        votes = [yes(plans[0], name, digest) for name, digest in zip("ab", digests, strict=True)]
        assert await together(a.agreement.decide(votes[0]), b.agreement.decide(votes[1])) == [True, True]

    run(test)


def test_an_accused_island_is_left_out_of_the_next_attempt_and_then_behind() -> None:
    async def test() -> None:
        islands = a, b, c = await leaders("abc", start_islands=3)

        def accuse(leader: Leader, plan: Plan) -> None:
            raise PoisonError("c", "nan")

        first = await together(a.attempt(in_reduce=accuse), b.attempt(), c.attempt())
        assert plans_of(first) == [(0, ["a", "b", "c"], False)] * 3
        *second, left_out = await together(*(i.attempt() for i in islands))
        assert plans_of(second) == [(1, ["a", "b"], True)] * 2
        assert isinstance(left_out, BehindError)
        c.take_state(a)
        assert plans_of(await together(*(i.attempt() for i in islands))) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


# -- islands die ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "abc")
def test_an_island_lost_before_the_plan_is_not_in_it(name: str) -> None:
    async def test() -> None:
        islands = await leaders("abc", start_islands=2)
        victim, survivors = split(islands, name)
        names = [i.name for i in survivors]
        running = asyncio.gather(*(i.attempt() for i in survivors))
        await until(victim.hears("".join(names)))
        victim.hub.lose(name)
        assert plans_of(await running) == [(0, names, True)] * 2
        assert now() < 3 * PING_SECONDS

    run(test)


@pytest.mark.parametrize("moment", ["in_reduce", "before_vote"])
@pytest.mark.parametrize("name", "abc")
def test_survivors_of_a_loss_abort_together_and_go_on_without_it(moment: str, name: str) -> None:
    async def test() -> None:
        islands = await leaders("abc", start_islands=3)
        faults = [{moment: die} if i.name == name else {} for i in islands]
        results = await together(*(i.attempt(**f) for i, f in zip(islands, faults, strict=True)))
        assert [i.name for i, r in zip(islands, results, strict=True) if isinstance(r, Gone)] == [name]
        assert plans_of([r for r in results if not isinstance(r, Gone)]) == [(0, ["a", "b", "c"], False)] * 2
        _, survivors = split(islands, name)
        second = await together(*(i.attempt() for i in survivors))
        assert plans_of(second) == [(1, [i.name for i in survivors], True)] * 2
        assert survivors[0].digest == survivors[1].digest
        assert now() < 4 * PING_SECONDS

    run(test)


def test_when_the_planner_dies_with_its_plan_the_next_by_name_plans() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=2)

        async def plan_and_die() -> None:
            await a.plan()
            a.hub.lose("a")  # Its offers have not left yet.

        _, *results = await together(plan_and_die(), b.attempt(), c.attempt())
        assert plans_of(results) == [(0, ["b", "c"], True)] * 2
        assert {plan.planner for plan, _ in results} == {"b"}

    run(test)


def test_survivors_agree_when_the_lost_island_had_voted_to_one_of_them_only() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)

        async def vote_to_a_and_die() -> None:
            plan = await c.plan()
            await c.tell(a, yes(plan, "c", await c.reduce(plan)))
            c.hub.lose("c")

        left, right, _ = await together(a.attempt(), b.attempt(), vote_to_a_and_die())
        assert plans_of([left]) == plans_of([right])
        assert a.digest == b.digest

    run(test)


def test_a_lost_island_that_is_back_takes_part_again() -> None:
    async def test() -> None:
        islands = a, b, c = await leaders("abc", start_islands=2)
        early = asyncio.gather(a.attempt(), b.attempt())
        await until(c.hears("ab"))
        c.hub.lose("c")
        assert plans_of(await early) == [(0, ["a", "b"], True)] * 2
        c.hub.heal("c")
        c.take_state(a)
        await until(lambda: "c" in a.protocol.live and "c" in b.protocol.live)
        early = asyncio.gather(a.attempt(), b.attempt())
        await until(c.hears("ab"))
        assert plans_of([await c.attempt(), *await early]) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


def test_an_island_that_has_moved_is_found_by_its_record() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.tell(a, b.ready())
        moved = LoopbackMessenger(a.hub, "run", Endpoint("b", 7))
        heard = asyncio.Event()

        async def hear(source: Endpoint, body: bytes) -> bytes:
            heard.set()
            return b.protocol.standing.model_dump_json().encode()

        moved.serve("standing", hear)
        await b.announce(control_addresses=[moved.address])
        await b.messenger.close()
        await heard.wait()
        await until(lambda: "b" not in a.protocol.lost)
        assert now() < 4 * PING_SECONDS

    run(test)


# -- islands freeze -------------------------------------------------------------------------------------------

FOUND_SECONDS = PING_SECONDS + max(FLOORS["call"], MAX_FIRST_SECONDS["call"])
"""A ping is sent, and not answered within the limit of a call."""


def test_a_silent_island_is_lost_within_the_limit_of_a_call_and_the_others_go_on() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        freeze(c)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2
        assert now() <= FOUND_SECONDS + PING_SECONDS

    run(test)


@pytest.mark.parametrize("moment", ["in_reduce", "before_vote"])
@pytest.mark.parametrize("name", "abc")
def test_an_island_that_freezes_in_a_round_ends_the_attempt_and_the_others_commit(moment: str, name: str) -> None:
    async def test() -> None:
        islands = await leaders("abc", start_islands=3)
        frozen, others = split(islands, name)
        stuck = asyncio.create_task(frozen.attempt(**{moment: freeze}))
        first = await together(*(i.attempt() for i in others))
        assert plans_of(first) == [(0, ["a", "b", "c"], False)] * 2
        second = await together(*(i.attempt_until_committed() for i in others))
        assert [p.names for p in second if isinstance(p, Plan)] == [[i.name for i in others]] * 2
        assert now() <= 2 * FOUND_SECONDS
        assert not stuck.done()

    run(test)


@pytest.mark.parametrize("moment", ["in_reduce", "before_vote"])
def test_an_island_that_wakes_learns_that_its_attempt_failed_and_that_it_is_behind(moment: str) -> None:
    async def test() -> None:
        islands = a, b, c = await leaders("abc", start_islands=3)
        stuck = asyncio.create_task(c.attempt(**{moment: freeze}))
        await together(a.attempt_until_committed(), b.attempt_until_committed())
        await wake(c)
        assert plans_of([await stuck]) == [(0, ["a", "b", "c"], False)]
        with pytest.raises(BehindError, match="a, b in round 1 with 200 tokens"):
            await c.attempt()
        c.take_state(a)
        assert plans_of(await together(*(i.attempt() for i in islands))) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


def test_an_island_that_stood_still_does_not_commit_on_votes_that_came_meanwhile() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        plans = await asyncio.gather(a.plan(), b.plan())
        digests = await asyncio.gather(*(i.reduce(p) for i, p in zip((a, b), plans, strict=True)))
        # b gives a up and aborts; its yes, from before that, is what a reads when it goes on.
        b.protocol.vote(yes(plans[1], "b", digests[1]))
        b.protocol.lose("a")
        assert b.protocol.conclude(is_late=False) == "abort"
        stand_still(2 * FROZEN_SECONDS)
        await asyncio.sleep(0.01)
        await b.tell(a, yes(plans[1], "b", digests[1]))
        assert not await a.agreement.decide(yes(plans[0], "a", digests[0]))

    run(test)


# -- islands behind -------------------------------------------------------------------------------------------


def test_an_island_behind_by_a_round_is_told_so() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        for island in (a, b):
            island.enter(3)
        c.enter(2)
        early = asyncio.gather(a.attempt(), b.attempt())
        with pytest.raises(BehindError, match="a, b in round 3 .* this island in round 2") as caught:
            await c.attempt()
        assert caught.value.donors == ("a", "b")
        c.enter(3)
        assert plans_of([await c.attempt(), *await early]) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


@pytest.mark.parametrize("name", "abc")
def test_the_island_whose_state_differs_from_most_is_behind_and_the_others_go_on(name: str) -> None:
    async def test() -> None:
        islands = await leaders("abc")
        for island in islands:
            island.enter(3, OTHER if island.name == name else START)
        results = await together(*(i.attempt() for i in islands))
        for island, result in zip(islands, results, strict=True):
            if island.name == name:
                assert isinstance(result, BehindError)
                assert result.donors == tuple(sorted(set("abc") - {name}))
                island.take_state(split(islands, name)[1][0])
            else:
                assert plans_of([result]) == [(0, sorted(set("abc") - {name}), True)]

    run(test)


@pytest.mark.parametrize("is_lost", [False, True], ids=["left", "lost"])
def test_an_island_ahead_that_is_gone_holds_nobody_up(is_lost: bool) -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        c.enter(1)
        await until(lambda: a.hears("c", "standing")() or "c" in a.protocol.standings)
        if is_lost:
            c.hub.lose("c")
        else:
            await c.say_goodbye()
        await until(lambda: not a.protocol.live.keys() & {"c"} and not b.protocol.live.keys() & {"c"})
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2

    run(test)


def test_an_island_that_is_behind_takes_part_in_no_plan() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        c.enter(1)
        with pytest.raises(BehindError):
            await a.attempt()
        # b has not heard of c, and counts a in.
        plan = Plan(round=0, attempt=0, planner="b", participants=[a.ready(), b.ready()])
        b.protocol.prepare(b.ready())
        await b.tell(a, plan)
        await until(lambda: (plan.id, "a") in b.protocol.votes)
        assert b.protocol.votes[plan.id, "a"].digest is None

    run(test)


# -- goodbye --------------------------------------------------------------------------------------------------


def test_an_island_that_has_said_goodbye_is_not_waited_for() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        early = asyncio.gather(a.attempt(), b.attempt())
        await until(c.hears("ab"))
        started = now()
        await c.say_goodbye()
        assert plans_of(await early) == [(0, ["a", "b"], True)] * 2
        assert now() - started < PING_SECONDS

    run(test)


def test_an_island_that_has_said_goodbye_asks_nobody_to_wait_for_it() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.say_goodbye()
        # The answer to a ping that has crossed the goodbye.
        assert not parse(Standing, await a.tell(b, a.protocol.standing)).is_coming

    run(test)


def test_a_goodbye_in_an_attempt_lets_it_end_first() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        plans = await asyncio.gather(a.plan(), b.plan())
        digests = await asyncio.gather(*(i.reduce(p) for i, p in zip((a, b), plans, strict=True)))
        leaving = asyncio.create_task(b.say_goodbye())
        votes = [yes(plans[0], name, digest) for name, digest in zip("ab", digests, strict=True)]
        assert await together(a.agreement.decide(votes[0]), b.agreement.decide(votes[1])) == [True, True]
        await leaving
        assert a.protocol.present == frozenset()

    run(test)


def test_a_goodbye_to_silent_islands_takes_seconds() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        freeze(b)
        await a.say_goodbye()
        assert now() <= GOODBYE_SECONDS

    run(test)


# -- in the inner steps, and at the end -------------------------------------------------------------------------


def test_inner_steps_go_on_while_nobody_waits_or_waiting_is_worth_it() -> None:
    async def test() -> None:
        a, b = await leaders("ab", wait_seconds=60.0)
        assert await a.agreement.interruption(1e6, entered_late=True) == ""
        await b.tell(a, b.ready())
        assert await a.agreement.interruption(59.0, entered_late=False) == ""

    run(test)


@pytest.mark.parametrize("seconds_left,entered_late", [(61.0, False), (1.0, True)])
def test_inner_steps_end_when_others_wait_in_vain(seconds_left: float, entered_late: bool) -> None:
    async def test() -> None:
        a, b = await leaders("ab", wait_seconds=60.0)
        await b.tell(a, b.ready())
        assert await a.agreement.interruption(seconds_left, entered_late=entered_late) == "waited for"

    run(test)


def test_the_more_islands_wait_the_sooner_inner_steps_end() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        for _ in range(3):
            a.deadlines.observe("round", 60.0)
        await b.tell(a, b.ready())
        assert await a.agreement.interruption(45.0, entered_late=False) == ""
        await c.tell(a, c.ready())
        assert await a.agreement.interruption(45.0, entered_late=False) == "waited for"

    run(test)


def test_inner_steps_do_not_end_for_islands_that_are_lost() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.tell(a, b.ready())
        a.hub.lose("b")
        await until(lambda: not a.protocol.live)
        assert await a.agreement.interruption(1e6, entered_late=True) == ""

    run(test)


def test_inner_steps_end_when_another_history_survives() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.agreement.stand(Standing(round=1, tokens=200, digest=OTHER))
        await until(lambda: a.protocol.live.get("b") == b.protocol.standing)
        assert await a.agreement.interruption(1.0, entered_late=False) == "behind"

    run(test)


def test_at_the_end_an_island_stays_until_the_others_have_the_last_round() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await until(lambda: "b" in a.protocol.live)
        a.enter(1)
        staying = asyncio.create_task(a.agreement.linger(60.0))
        await asyncio.sleep(20)
        assert not staying.done()
        await b.agreement.stand(a.protocol.standing)
        assert await staying is False
        assert now() < 25

    run(test)


def test_at_the_end_nobody_is_waited_for_longer_than_asked() -> None:
    async def test() -> None:
        a, _ = await leaders("ab")
        await until(lambda: "b" in a.protocol.live)
        a.enter(1)
        assert await a.agreement.linger(10.0) is False
        assert 10 <= now() < 15

    run(test)


def test_at_the_end_islands_that_are_gone_are_not_waited_for() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        await until(lambda: len(a.protocol.live) == 2)
        a.enter(1)
        a.hub.lose("b")
        await c.say_goodbye()
        assert await a.agreement.linger(60.0) is False
        assert now() < 5

    run(test)


def test_at_the_end_an_island_behind_is_told_so() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.agreement.stand(Standing(round=1, tokens=200, digest=OTHER))
        await until(lambda: a.protocol.live.get("b") == b.protocol.standing)
        assert await a.agreement.linger(60.0) is True

    run(test)


# -- donors -----------------------------------------------------------------------------------------------------


async def donors_of(island: Leader) -> list[str]:
    return [member.island for member in await island.agreement.find_donors()]


def test_the_donors_of_an_island_that_nobody_has_spoken_to_are_in_the_records() -> None:
    async def test() -> None:
        hub = Hub()
        for name, round_number in [("a", 1), ("b", 2), ("c", 2)]:
            island = Leader(hub, name)
            island.enter(round_number)
            await island.announce()
        assert await donors_of(Leader(hub, "d")) == ["b", "c"]

    run(test)


def test_an_island_that_has_committed_no_less_than_the_others_has_no_donors() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        a.enter(1)
        await until(lambda: b.agreement.protocol.standings.get("a") == a.protocol.standing)
        assert await donors_of(a) == []
        assert await donors_of(b) == ["a"]

    run(test)


def test_donors_that_have_spoken_count_more_than_records() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        # The record of c is from before it lost its state.
        await c.announce(round=5, tokens=500)
        await b.agreement.stand(Standing(round=1, tokens=200, digest=OTHER))
        await until(lambda: a.protocol.live.get("b") == b.protocol.standing)
        assert await donors_of(a) == ["b"]

    run(test)


# -- who is who -------------------------------------------------------------------------------------------------


def test_two_runs_on_one_network_do_not_mix() -> None:
    async def test() -> None:
        hub = Hub()
        one = await leaders("ab", hub, run_id="one", start_islands=2)
        two = await leaders("bc", hub, run_id="two", start_islands=2)
        results = await together(*(i.attempt() for i in one + two))
        assert plans_of(results) == [(0, ["a", "b"], True)] * 2 + [(0, ["b", "c"], True)] * 2
        assert [i.protocol.present for i in one + two] == [{"b"}, {"a"}, {"c"}, {"b"}]

    run(test)


def test_an_island_with_another_config_is_not_met() -> None:
    async def test() -> None:
        (a,) = await leaders("a")
        (b,) = await leaders("b", a.hub, config_hash="d" * 32)
        await asyncio.sleep(3 * PING_SECONDS)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a"], True), (0, ["b"], True)]

    run(test)


def test_a_second_island_of_the_same_name_is_refused() -> None:
    async def test() -> None:
        (a,) = await leaders("a")
        with pytest.raises(InputError, match="'a'"):
            await Leader(a.hub, "a").announce(identity="f" * 8)

    run(test)


def test_a_restarted_island_takes_its_own_place_in_the_round() -> None:
    async def test() -> None:
        islands = a, b, c = await leaders("abc", start_islands=3)
        await together(*(i.attempt(in_reduce=die) if i is b else i.attempt() for i in islands))
        freeze(b)
        a.hub.heal("b")
        (again,) = await leaders("b", a.hub, start_islands=3, incarnation="01")
        await until(lambda: "b" in a.protocol.live and "b" in c.protocol.live)
        early = asyncio.gather(a.attempt(), c.attempt())
        await until(again.hears("ac"))
        results = [await again.attempt(), *await early]
        assert plans_of(results) == [(1, ["a", "b", "c"], True)] * 3
        assert again.incarnation in [p.incarnation for p in results[1][0].participants]

    run(test)


@pytest.mark.parametrize(
    "body,cause", [(b"\x00", "not a Vote"), (b"", "not a Vote"), (b"{}", "not a Vote: plan: Field required")]
)
def test_what_is_no_message_is_refused_and_the_round_goes_on(body: bytes, cause: str) -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        with pytest.raises(MessageError, match=cause):
            await b.messenger.call(a.messenger.address, "vote", body, timeout_seconds=5.0)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2

    run(test)


def test_nobody_votes_for_another_island() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        plans = await asyncio.gather(a.plan(), b.plan(), c.plan())
        with pytest.raises(MessageError, match="'c' speaks for 'b'"):
            await c.tell(a, no(plans[0], "b", "boo"))
        assert not a.protocol.has_heard_no

    run(test)
