"""Islands die, freeze and leave before and during a round: the others continue with one result."""

import asyncio

import pytest

from outer.agreement.messages import Plan, Status, Vote
from outer.agreement.running.driver import GOODBYE_SECONDS, BehindError
from outer.agreement.running.failure_detector import PING_SECONDS
from outer.membership.loopback import LoopbackMessenger
from outer.network.deadlines import FLOORS, MAX_FIRST_SECONDS
from outer.network.endpoints import Endpoint
from outer.network.event_loop import FROZEN_SECONDS
from outer.network.messages import parse
from tests.outer.clock import now, run, stand_still, until
from tests.outer.leaders import Gone, die, freeze, leaders, plans_of, split, together, wake
from tests.outer.signers import signed_yes

OTHER = "bb" * 16


# -- islands die -----------------------------------------------------------------------------------


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
        assert [i.name for i, r in zip(islands, results, strict=True) if isinstance(r, Gone)] == [
            name
        ]
        assert (
            plans_of([r for r in results if not isinstance(r, Gone)])
            == [(0, ["a", "b", "c"], False)] * 2
        )
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
            a.hub.lose("a")  # Its messages have not left yet.

        dying = asyncio.create_task(plan_and_die())
        results = await asyncio.gather(b.attempt(), c.attempt())
        assert plans_of(results) == [(0, ["b", "c"], True)] * 2
        assert {plan.planner for plan, _ in results} == {"b"}
        await dying

    run(test)


def test_survivors_agree_when_the_lost_island_had_voted_to_one_of_them_only() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)

        async def vote_to_a_and_die() -> None:
            plan = await c.plan()
            await c.tell(a, signed_yes(plan, "c", await c.reduce(plan)))
            c.hub.lose("c")

        dying = asyncio.create_task(vote_to_a_and_die())
        left, right = plans_of(await together(a.attempt(), b.attempt()))
        assert left == right
        await dying
        assert a.digest == b.digest

    run(test)


def test_a_lost_island_that_is_back_takes_part_again() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=2)
        early = asyncio.gather(a.attempt(), b.attempt())
        await until(c.hears("ab"))
        c.hub.lose("c")
        assert plans_of(await early) == [(0, ["a", "b"], True)] * 2
        c.hub.heal("c")
        c.take_state(a)
        await until(lambda: "c" in a.knowledge.live and "c" in b.knowledge.live)
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
            return b.knowledge.status.model_dump_json().encode()

        moved.serve("status", hear)
        await b.announce(control_addresses=[moved.address])
        await b.messenger.close()
        await heard.wait()
        assert now() < 2 * PING_SECONDS, "the first ping was tried again"
        await until(lambda: "b" not in a.knowledge.lost)

    run(test)


# -- islands freeze --------------------------------------------------------------------------------

FOUND_SECONDS = PING_SECONDS + max(FLOORS["call"], MAX_FIRST_SECONDS["call"])
"""Time until a ping is sent and has not been answered within the limit of a call."""


def test_a_silent_island_is_lost_within_the_limit_of_a_call_and_the_others_go_on() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        freeze(c)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2
        assert now() <= FOUND_SECONDS + PING_SECONDS

    run(test)


@pytest.mark.parametrize("moment", ["in_reduce", "before_vote"])
@pytest.mark.parametrize("name", "abc")
def test_an_island_that_freezes_in_a_round_ends_the_attempt_and_the_others_commit(
    moment: str, name: str
) -> None:
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
def test_an_island_that_wakes_learns_that_its_attempt_failed_and_that_it_is_behind(
    moment: str,
) -> None:
    async def test() -> None:
        islands = a, b, c = await leaders("abc", start_islands=3)
        stuck = asyncio.create_task(c.attempt(**{moment: freeze}))
        await together(a.attempt_until_committed(), b.attempt_until_committed())
        await wake(c)
        assert plans_of([await stuck]) == [(0, ["a", "b", "c"], False)]
        with pytest.raises(BehindError, match="a, b in round 1 with 200 tokens"):
            await c.attempt()
        c.take_state(a)
        assert (
            plans_of(await together(*(i.attempt() for i in islands)))
            == [(0, ["a", "b", "c"], True)] * 3
        )

    run(test)


def test_an_island_that_stood_still_does_not_commit_on_votes_that_came_meanwhile() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        plans = await asyncio.gather(a.plan(), b.plan())
        digests = await asyncio.gather(*(i.reduce(p) for i, p in zip((a, b), plans, strict=True)))
        # b gives a up and aborts. When a wakes, it reads the yes that b had sent before.
        b.protocol.vote(Vote.yes(plans[1], "b", digests[1]))
        b.protocol.mark_lost("a")
        assert b.protocol.conclude(is_late=False) == "abort"
        stand_still(2 * FROZEN_SECONDS)
        await asyncio.sleep(0.01)
        await b.tell(a, signed_yes(plans[1], "b", digests[1]))
        assert not await a.driver.decide(Vote.yes(plans[0], "a", digests[0]))

    run(test)


def test_an_island_that_stood_still_before_its_vote_left_does_not_commit_on_the_votes_it_had() -> (
    None
):
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        plans = await asyncio.gather(a.plan(), b.plan())
        digests = await asyncio.gather(*(i.reduce(p) for i, p in zip((a, b), plans, strict=True)))
        b.protocol.vote(Vote.yes(plans[1], "b", digests[1]))
        await b.tell(a, signed_yes(plans[1], "b", digests[1]))

        def freeze_before_the_vote_leaves() -> None:
            b.protocol.mark_lost("a")
            assert b.protocol.conclude(is_late=False) == "abort"
            stand_still(2 * FROZEN_SECONDS)

        vote = Vote.yes(plans[0], "a", digests[0])
        assert not await a.driver.decide(vote, freeze_before_the_vote_leaves)

    run(test)


def test_an_island_that_wakes_while_it_gathers_does_not_plan_without_the_others() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2
        freeze(b)
        early = asyncio.create_task(a.attempt())
        await asyncio.sleep(0.3)  # It has sent its message to b and waits for the reply.
        stand_still(2 * FROZEN_SECONDS)
        await asyncio.sleep(0.1)
        assert a.knowledge.lost == frozenset() and not early.done()
        for rank in b.ranks:
            rank.messenger.is_awake.set()
        assert plans_of(await together(early, b.attempt())) == [(0, ["a", "b"], True)] * 2

    run(test)


# -- goodbye ---------------------------------------------------------------------------------------


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
        # This is the reply to a ping that crosses the goodbye.
        assert not parse(Status, await a.tell(b, a.knowledge.status)).is_coming

    run(test)


def test_an_island_that_has_said_goodbye_is_out_although_its_record_stands() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        await b.driver.say_goodbye(b.goodbye())
        await asyncio.sleep(3 * PING_SECONDS)
        assert "b" in await a.membership.members()
        assert a.knowledge.present == frozenset()

    run(test)


def test_a_goodbye_in_an_attempt_lets_it_end_first() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        plans = await asyncio.gather(a.plan(), b.plan())
        digests = await asyncio.gather(*(i.reduce(p) for i, p in zip((a, b), plans, strict=True)))
        leaving = asyncio.create_task(b.say_goodbye())
        votes = [
            Vote.yes(plans[0], name, digest) for name, digest in zip("ab", digests, strict=True)
        ]
        assert await together(a.driver.decide(votes[0]), b.driver.decide(votes[1])) == [True, True]
        await leaving
        assert a.knowledge.present == frozenset()

    run(test)


def test_a_goodbye_to_silent_islands_takes_seconds() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        freeze(b)
        await a.say_goodbye()
        assert now() <= GOODBYE_SECONDS

    run(test)
