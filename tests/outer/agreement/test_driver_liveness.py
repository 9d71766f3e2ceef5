"""Islands that keep silent, disagree or accuse hold up nobody for long, and a wait says whom it
waits for.
"""

import asyncio
import logging

import pytest

from outer.agreement.messages import Plan, Vote
from outer.agreement.running.failure_detector import PING_SECONDS
from outer.agreement.running.limits import commit_bound, plan_limit, query_limit, vote_limit
from outer.agreement.running.waiting import REPORT_SECONDS
from outer.errors import BehindError, MessageError, OuterError, PoisonError
from outer.network.deadlines import DEFAULT_FLOOR_SECONDS
from outer.network.endpoints import Endpoint
from outer.report import Waiting
from tests.outer.clock import now, run, stand_still, until
from tests.outer.leaders import Fault, Leader, freeze, leaders, plans_of, together

WRONG = "ee" * 16
SILENT_SECONDS = DEFAULT_FLOOR_SECONDS + 10.0
"""A vote after a short reduce is waited for 10 s, then a reply to the query for 6 s; the rest is a
margin.
"""


async def commit(*islands: Leader) -> list[list[str]]:
    """Attempts of these islands until they commit; the participants, as each of them saw them."""
    plans = await together(*(island.attempt_until_committed() for island in islands))
    for plan in plans:
        if isinstance(plan, BaseException):
            raise plan
    return [plan.names for plan in plans if isinstance(plan, Plan)]


# -- silence ---------------------------------------------------------------------------------------


async def reduce_and_keep_silent(island: Leader) -> None:
    await island.reduce(await island.plan())


def test_a_participant_that_reduces_and_never_votes_is_left_out_of_the_next_plan() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3, quorum=2)
        silent = asyncio.create_task(reduce_and_keep_silent(c))
        assert await commit(a, b) == [["a", "b"]] * 2
        assert now() < SILENT_SECONDS
        assert "c" in a.knowledge.live, "it lives and answers"
        await silent

    run(test)


def test_a_participant_that_sends_no_payloads_is_left_out_of_the_next_plan() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3, quorum=2, wait_seconds=20.0)
        silent = asyncio.create_task(c.plan())
        plans = await together(a.attempt_until_committed(), b.attempt_until_committed())
        assert [(p.attempt, p.names) for p in plans if isinstance(p, Plan)] == [(1, ["a", "b"])] * 2
        assert now() < 20.0 + 20.0 + 5.0, (
            "the limits of the reduce and, after one of 20 s, of the votes"
        )
        await silent

    run(test)


def test_a_participant_that_acknowledges_no_votes_is_left_out_of_the_next_plan() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3, quorum=2)

        async def refuse(source: Endpoint, body: bytes) -> bytes:
            raise MessageError("no")

        c.messenger.serve("vote", refuse)
        c.messenger.serve("outcomequery", refuse)
        stuck = asyncio.create_task(c.attempt())
        assert await commit(a, b) == [["a", "b"]] * 2
        assert now() < SILENT_SECONDS
        stuck.cancel()

    run(test)


def test_a_planner_that_makes_no_plan_is_passed_over() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        a.protocol.prepare(
            a.ready()
        )  # Its ready message goes out again each second, and it never plans.
        await until(lambda: b.hears("a")() and c.hears("a")())
        started, limit = now(), plan_limit(b.deadlines)
        plans = await asyncio.gather(b.plan(), c.plan())
        assert [plan.planner for plan in plans] == ["b", "b"]
        assert plans[0].names == ["a", "b", "c"]
        assert now() - started < limit + 2 * PING_SECONDS

    run(test)


# -- digests that differ ---------------------------------------------------------------------------


async def attempt_wrongly(island: Leader) -> bool:
    plan = await island.plan()
    await island.reduce(plan)
    return await island.driver.decide(Vote.yes(plan, island.name, WRONG))


def test_one_of_three_whose_digest_differs_is_left_out_and_takes_the_others_state() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)

        async def differ() -> None:
            assert not await attempt_wrongly(c)
            with pytest.raises(BehindError, match="in round 1"):
                await attempt_wrongly(c)
            c.take_state(a)

        differing = asyncio.create_task(differ())
        assert await commit(a, b) == [["a", "b"]] * 2
        assert now() < 5 * PING_SECONDS
        await differing
        assert await commit(a, b, c) == [["a", "b", "c"]] * 3
        assert a.digest == b.digest == c.digest

    run(test)


def test_two_islands_whose_digests_differ_again_and_again_stop_and_print_both() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)

        async def differ() -> None:
            while True:
                await attempt_wrongly(b)

        results = await together(a.attempt_until_committed(), differ())
        for result in results:
            assert isinstance(result, OuterError)
            assert f"b {WRONG}" in str(result) and "versions" in str(result)
        assert now() < SILENT_SECONDS

    run(test)


# -- all blow up -----------------------------------------------------------------------------------


def accuses(name: str, *, times: int) -> Fault:
    """Fault: this island finds that the payload of `name` is nan, this many times."""
    left = [times]

    def fault(leader: Leader, plan: Plan) -> None:
        if left[0]:
            left[0] -= 1
            raise PoisonError(name, "nan")

    return fault


async def attempts(island: Leader, fault: Fault) -> Plan:
    while True:
        plan, is_committed = await island.attempt(in_reduce=fault)
        if is_committed:
            return plan


@pytest.mark.parametrize("ring", ["ab", "abc"])
def test_islands_that_all_send_nan_once_commit_together_afterwards(ring: str) -> None:
    async def test() -> None:
        islands = await leaders(ring, start_islands=len(ring))
        nexts = ring[1:] + ring[0]
        faults = [accuses(name, times=1) for name in nexts]
        plans = await together(
            *(attempts(i, fault) for i, fault in zip(islands, faults, strict=True))
        )
        assert [plan.names for plan in plans if isinstance(plan, Plan)] == [list(ring)] * len(ring)
        assert now() < SILENT_SECONDS

    run(test)


@pytest.mark.parametrize("ring", ["ab", "abc"])
def test_islands_that_all_send_nan_for_ever_stop_and_are_named(ring: str) -> None:
    async def test() -> None:
        islands = await leaders(ring, start_islands=len(ring))
        faults = [accuses(name, times=1000) for name in ring[1:] + ring[0]]
        results = await together(
            *(attempts(i, fault) for i, fault in zip(islands, faults, strict=True))
        )
        ended = [str(result) for result in results if isinstance(result, OuterError)]
        assert ended, results
        assert any(all(f"{name}: " in text for name in ring) for text in ended), ended
        assert now() < 4 * SILENT_SECONDS

    run(test)


# -- what was measured in a freeze -----------------------------------------------------------------


def test_calls_that_a_freeze_has_stretched_are_not_measured() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        before = a.deadlines.limit("call")
        for _ in range(6):
            freeze(b)
            await a.driver.update_status(a.knowledge.status)
            await asyncio.sleep(0.01)
            stand_still(0.9 * before)
            for rank in b.ranks:
                rank.messenger.is_awake.set()
            await asyncio.sleep(0.01)
        assert a.deadlines.num_freezes >= 6
        assert a.deadlines.limit("call") <= before

    run(test)


def test_after_a_freeze_and_a_death_the_others_commit_within_the_bound() -> None:
    async def test() -> None:
        islands = a, b, c, d = await leaders("abcd", start_islands=4)
        for _ in range(4):
            started = now()
            assert await commit(*islands) == [["a", "b", "c", "d"]] * 4
            for island in islands:
                island.deadlines.observe("round", now() - started)
                island.deadlines.observe("reduce", now() - started)
        stand_still(28.0)
        freeze(c)
        early = asyncio.create_task(commit(a, b))
        await asyncio.sleep(1.0)
        d.hub.lose("d")
        bound, fault_at = commit_bound(a.deadlines, num_waiting=2), now()
        assert await early == [["a", "b"]] * 2
        assert now() - fault_at < bound
        # Four attempts' limits, none of them stretched by the freeze: 2 x (8 + 10 + 10 + 4) + 4 s.
        assert bound < 90.0

    run(test)


def test_the_bound_is_the_sum_that_its_description_says() -> None:
    async def test() -> None:
        (a,) = await leaders("a")
        for kind in ("call", "reduce", "vote", "round"):
            for _ in range(3):
                a.deadlines.observe(kind, 1.0)
        attempt = (
            plan_limit(a.deadlines) + 11.0 + vote_limit(a.deadlines, 0.0) + query_limit(a.deadlines)
        )
        assert (
            plan_limit(a.deadlines),
            vote_limit(a.deadlines, 0.0),
            query_limit(a.deadlines),
        ) == (10.0, 11.0, 5.0)
        assert commit_bound(a.deadlines, num_waiting=2) == 7.0 + 2 * attempt
        assert commit_bound(a.deadlines, num_waiting=2, num_absent=1) == 7.0 + 3.0 + 2 * attempt

    run(test)


# -- whom it waits for -----------------------------------------------------------------------------


def test_a_gathering_says_every_few_seconds_whom_it_waits_for_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        seen: list[Waiting | None] = []
        a, b, c, d = await leaders("abcd", start_islands=2, on_wait=seen.append)
        freeze(d)
        early = asyncio.create_task(commit(a, b))
        await asyncio.sleep(2.5 * REPORT_SECONDS)
        last = next(waiting for waiting in reversed(seen) if waiting is not None)
        assert last.phase == "gathering" and last.seconds > REPORT_SECONDS
        assert last.islands.keys() == {"c", "d"} and last.islands["c"] == "it is not ready"
        assert last.islands["d"].startswith("it is lost: loopback:run/d/0 did not answer ")
        await c.say_goodbye()
        await early
        assert seen[-1] is None

    with caplog.at_level(logging.INFO):
        run(test)
    assert any(
        "gathering for 10 s; c: it is not ready; d: it is lost" in r.getMessage()
        for r in caplog.records
    )


def test_a_vote_says_whose_vote_is_missing() -> None:
    async def test() -> None:
        seen: list[Waiting | None] = []
        a, b, c = await leaders("abc", start_islands=3, quorum=2, on_wait=seen.append)
        silent = asyncio.create_task(reduce_and_keep_silent(c))
        await commit(a, b)
        assert {"c": "it has not voted"} in [
            w.islands for w in seen if w is not None and w.phase == "voting"
        ]
        await silent

    run(test)


def test_an_island_that_commits_alone_is_told_that_its_rounds_may_be_thrown_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        await commit(a, b, c)
        b.hub.lose("b")
        c.hub.lose("c")
        assert plans_of([await a.attempt()]) == [(0, ["a"], True)]

    run(test)
    assert any("1 of the 3 islands of this run (a)" in r.getMessage() for r in caplog.records)
