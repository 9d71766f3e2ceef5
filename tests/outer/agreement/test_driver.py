"""Islands agree on the participants of a round and on its outcome."""

import asyncio
import logging

import pytest

from outer.agreement.messages import Plan, Vote
from outer.agreement.planner import TooFew
from outer.agreement.running.failure_detector import PING_SECONDS
from outer.agreement.running.too_few import WARN_SECONDS, FewIslands
from outer.errors import BehindError, PoisonError, QuorumError
from outer.network.deadlines import Deadlines
from tests.outer.clock import now, run, until
from tests.outer.leaders import START, Fault, Leader, fail, leaders, plans_of, together
from tests.outer.protocols import node

# -- plan and commit -------------------------------------------------------------------------------


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


def test_the_more_islands_wait_the_shorter_is_the_grace() -> None:
    async def test() -> None:
        a, b, _ = await leaders("abc")
        for island in (a, b):
            for _ in range(3):
                island.deadlines.observe("round", 60.0)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2
        assert 30 <= now() < 33

    run(test)


def test_on_sent_is_called_once_the_others_can_know() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        seen = []
        running = asyncio.create_task(b.attempt())
        plan = await a.driver.plan(a.ready(), lambda: seen.append("ready"))
        await a.driver.decide(Vote.no(plan, "a", "disk full"), lambda: seen.append("voted"))
        await running
        assert seen == ["ready", "voted"]

    run(test)


# -- too few islands -------------------------------------------------------------------------------


def test_a_run_that_its_first_islands_do_not_come_to_ends() -> None:
    async def test() -> None:
        (a,) = await leaders("a", wait_seconds=20.0, start_islands=2)
        with pytest.raises(
            QuorumError,
            match=r"round 0: 1 of 2 islands were here within 2\d s; outer.* finished the run",
        ):
            await a.attempt()

    run(test)


def test_below_the_quorum_wait_waits_and_says_so_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        (a,) = await leaders("a", quorum=2, wait_seconds=5.0)
        early = asyncio.create_task(a.attempt())
        await asyncio.sleep(1.5 * WARN_SECONDS)
        (b,) = await leaders("b", a.hub, quorum=2)
        assert plans_of([await b.attempt(), await early]) == [(0, ["a", "b"], True)] * 2

    run(test)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0] == (
        "round 0: BELOW QUORUM: 1 of 2 islands are here; waiting for the others; "
        "no other island answers: they are down, or have finished the run"
    )


def test_below_the_quorum_it_says_why_the_others_may_not_be_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    few = FewIslands(node("a", "").knowledge, Deadlines(5.0), lambda: "this clock is 50 s behind")
    few.check(TooFew(1, 2, is_start=False), waited=1.0, warned_at=-WARN_SECONDS, now=1.0)
    assert caplog.messages == [
        "round 0: BELOW QUORUM: 1 of 2 islands are here; waiting for the others; this clock is 50 "
        "s behind"
    ]


def test_below_the_quorum_continue_goes_on_and_says_so_in_every_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        (a,) = await leaders("a", quorum=2, below_quorum="continue")
        for _ in range(2):
            assert plans_of([await a.attempt()]) == [(0, ["a"], True)]

    run(test)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [w[: w.index(";")] for w in warnings] == [
        f"round {r}: BELOW QUORUM: 1 of 2 islands" for r in (0, 1)
    ]


def test_below_the_quorum_stop_ends_the_island_after_the_grace() -> None:
    async def test() -> None:
        (a,) = await leaders("a", quorum=2, below_quorum="stop", wait_seconds=20.0)
        with pytest.raises(
            QuorumError, match=r"round 0: 1 of outer\.quorum 2 islands .* is 'stop'"
        ):
            await a.attempt()
        assert now() >= 20

    run(test)


# -- abort -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["in_reduce", "before_vote"])
@pytest.mark.parametrize("name", "abc")
def test_one_islands_failure_aborts_everywhere_and_the_next_attempt_commits(
    moment: str, name: str
) -> None:
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
        # a and b have finished their reduce when c votes no: their connections are complete, those
        # of c are not.
        faults: list[Fault | None] = [None, None, fail]
        aborted = await together(
            *(i.attempt(before_vote=f) for i, f in zip(islands, faults, strict=True))
        )
        assert plans_of(aborted) == [(0, ["a", "b", "c"], False)] * 3
        assert (
            plans_of(await together(*(i.attempt() for i in islands)))
            == [(1, ["a", "b", "c"], True)] * 3
        )

    run(test)


def test_a_refused_plan_in_a_lasting_group_leaves_nobody_behind() -> None:
    async def test() -> None:
        islands = a, b, c = await leaders("abc", start_islands=3)
        await together(*(i.attempt() for i in islands))
        # c has used its ready messages for the first attempts in a plan that the others have not
        # seen.
        early = asyncio.gather(a.attempt_until_committed(), b.attempt_until_committed())
        await until(c.hears("ab"))
        c.protocol.readies.used["c"] = 1, 4
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
        # c neither connects nor leaves, so the others could wait for it until their deadline of ten
        # minutes.
        started = now()
        assert not await c.driver.decide(Vote.no(plan, "c", "out of memory"))
        assert plans_of(await running) == [(0, ["a", "b", "c"], False)] * 2
        assert now() - started < PING_SECONDS

    run(test)


def test_a_no_reaches_the_ranks_that_do_not_lead() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2, num_ranks=2)
        plans = await asyncio.gather(a.plan(), b.plan())
        # b's second rank has begun, but its leader has not and passes nothing on.
        second = asyncio.create_task(b._reduce(plans[1], 1))
        await a.driver.decide(Vote.no(plans[0], "a", "out of memory"))
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
            await q.tell(island, Vote.no(plans[0], "q", "boo"))
        digests = await asyncio.gather(*(i.reduce(p) for i, p in zip((a, b), plans, strict=True)))
        votes = [
            Vote.yes(plans[0], name, digest) for name, digest in zip("ab", digests, strict=True)
        ]
        assert await together(a.driver.decide(votes[0]), b.driver.decide(votes[1])) == [True, True]

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
        assert (
            plans_of(await together(*(i.attempt() for i in islands)))
            == [(0, ["a", "b", "c"], True)] * 3
        )

    run(test)
