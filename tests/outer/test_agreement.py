"""Islands agree on who takes part in a round and on what came of it, whoever dies when."""

import asyncio
import gc
from collections.abc import Callable

import pytest

from outer.agreement import Behind
from outer.attempt import Attempts
from outer.deadlines import Deadlines
from outer.errors import MessageError, PeerLost, QuorumError, TransportError
from outer.rounds import Plan, Question, Ready, make_plan, parse
from outer.transports.base import Endpoint
from tests.outer.leaders import START, Fault, Gone, Leader, die, fail, leaders, run, together

OTHER = "bb" * 16


def plans_of(results: list) -> list[tuple[int, list[str], bool]]:
    """(attempt, participants, committed) of each; a failure is raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [(plan.attempt, plan.names, is_committed) for plan, is_committed in results]


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
        for round_number in range(5):
            results = await together(*(i.attempt() for i in islands))
            assert plans_of(results) == [(0, ["a", "b", "c"], True)] * 3
            assert {i.round for i in islands} == {round_number + 1}
        assert {i.attempts.epoch for i in islands} == {"0.0.a"}, "connected once, in the first round"

    run(test)


def test_start_islands_are_waited_for() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=3)
        met = heard_ready_from(a, {"b"}), heard_ready_from(b, {"a"})
        early = asyncio.gather(a.attempt(), b.attempt())
        for event in met:
            await event.wait()
        (c,) = await leaders("c", a.hub, start_islands=3)
        assert plans_of(await early_with(early, c)) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


async def early_with(early: asyncio.Future, late: Leader) -> list:
    last = await late.attempt()
    return [*await early, last]


def test_a_round_after_the_first_does_not_wait_for_start_islands() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=3)
        for island in (a, b):
            island.enter(4)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2

    run(test)


def test_a_live_island_that_is_not_ready_is_waited_for() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        early = asyncio.gather(a.attempt(), b.attempt())
        heard = heard_ready_from(c, {"a", "b"})
        await heard.wait()
        assert plans_of(await early_with(early, c)) == [(0, ["a", "b", "c"], True)] * 3

    run(test)


def heard_ready_from(leader: Leader, names: set[str]) -> asyncio.Event:
    """Set when all of these have told `leader` that they are ready."""
    heard, missing = asyncio.Event(), set(names)
    answer = leader.agreement._on_ready

    async def listen(source: Endpoint, body: bytes) -> bytes:
        missing.discard(parse(Ready, body).island)
        if not missing:
            heard.set()
        return await answer(body)

    leader.messenger.serve("ready", listen)
    return heard


def test_an_island_that_is_alive_but_late_is_left_out() -> None:
    async def test() -> None:
        a, b, _ = await leaders("abc", wait_seconds=0.2)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2

    run(test)


@pytest.mark.parametrize("needed", [{"quorum": 2}, {"start_islands": 2}])
def test_too_few_islands_end_the_wait_at_its_deadline(needed: dict[str, int]) -> None:
    async def test() -> None:
        (a,) = await leaders("a", wait_seconds=0.2, **needed)
        with pytest.raises(QuorumError, match="1 of 2 islands came"):
            await a.attempt()

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


class BreaksOnCancel:
    """A transport whose connection breaks in the moment in which the attempt is given up."""

    def __init__(self) -> None:
        self.is_waiting = asyncio.Event()

    async def connect(self, epoch: str, addresses: dict[Endpoint, str]) -> None:
        self.is_waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise PeerLost("b", "it left") from None

    async def disconnect(self) -> None:
        pass


def test_an_abort_leaves_no_error_that_nobody_has_looked_at() -> None:
    async def test() -> None:
        unseen: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        a, b = await leaders("ab")
        transport, plan = BreaksOnCancel(), make_plan("a", 0, {"a": a.ready(), "b": b.ready()})
        attempts = Attempts(transport, a.reducer, Deadlines(600.0))
        running = asyncio.create_task(attempts.run(plan, {}))
        await transport.is_waiting.wait()
        attempts.note_no(b.vote(plan, None))
        (error,) = await together(running)
        assert isinstance(error, TransportError) and "'b' voted no" in str(error)
        # What is thrown away with the attempt is what would complain.
        del running, error
        await asyncio.sleep(0)  # One turn: the event loop, too, lets go of it.
        gc.collect()
        assert not unseen

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
        islands = await leaders("abc", start_islands=3)
        await together(*(i.attempt() for i in islands))
        # c has seen attempts of this round that a, the planner, has not: it refuses a's first ones.
        islands[2].agreement._last_attempt[1] = 1
        plans = await together(*(i.attempt_until_committed() for i in islands))
        assert [(p.attempt, p.names) for p in plans] == [(2, ["a", "b", "c"])] * 3

    run(test)


def test_a_no_ends_a_running_reduce_at_once() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        running = asyncio.gather(a.attempt(), b.attempt())
        plan = await c.agreement.plan(c.ready())
        # c neither connects nor leaves: the others could wait for it until their deadline, ten minutes.
        assert not await c.agreement.decide(plan, None, "out of memory")
        assert plans_of(await running) == [(0, ["a", "b", "c"], False)] * 2

    run(test)


def test_a_no_of_an_island_outside_of_the_plan_changes_nothing() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        (q,) = await leaders("q", a.hub)

        def heckle(leader: Leader, plan: Plan) -> None:
            no = q.vote(plan, None)
            leader.attempts.note_no(no)
            leader.agreement._hear(no)

        await q.membership.leave()
        results = await together(a.attempt(in_reduce=heckle), b.attempt(in_reduce=heckle))
        assert plans_of(results) == [(0, ["a", "b"], True)] * 2

    run(test)


def test_after_an_abort_an_island_that_is_slow_to_come_back_is_not_left_out() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        await together(a.attempt(), b.attempt(), c.attempt(in_reduce=fail))
        early = asyncio.gather(a.attempt(), b.attempt())
        await heard_ready_from(c, {"a", "b"}).wait()
        assert plans_of(await early_with(early, c)) == [(1, ["a", "b", "c"], True)] * 3

    run(test)


# -- islands die ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "abc")
def test_an_island_lost_before_the_plan_is_not_in_it(name: str) -> None:
    async def test() -> None:
        islands = await leaders("abc", start_islands=2)
        victim = next(i for i in islands if i.name == name)
        survivors = [i for i in islands if i is not victim]
        running = asyncio.gather(*(i.attempt() for i in survivors))
        await heard_ready_from(victim, {i.name for i in survivors}).wait()
        victim.hub.lose(name)
        plan = (0, [i.name for i in survivors], True)
        assert plans_of(await running) == [plan] * 2

    run(test)


@pytest.mark.parametrize("moment", ["in_reduce", "before_vote"])
@pytest.mark.parametrize("name", "abc")
def test_survivors_of_a_loss_abort_together_and_go_on_without_it(moment: str, name: str) -> None:
    async def test() -> None:
        islands = await leaders("abc", start_islands=3)
        faults = [{moment: die} if i.name == name else {} for i in islands]
        results = await together(*(i.attempt(**f) for i, f in zip(islands, faults, strict=True)))
        lost = [i.name for i, result in zip(islands, results, strict=True) if isinstance(result, Gone)]
        assert lost == [name]
        first = [result for result in results if not isinstance(result, Gone)]
        assert plans_of(first) == [(0, ["a", "b", "c"], False)] * 2
        survivors = [i for i in islands if i.name != name]
        second = await together(*(i.attempt() for i in survivors))
        plan = (1, [i.name for i in survivors], True)
        assert plans_of(second) == [plan] * 2
        assert survivors[0].digest == survivors[1].digest

    run(test)


def test_when_the_planner_is_lost_the_next_by_name_plans() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=2)
        plans = asyncio.gather(b.agreement.plan(b.ready()), c.agreement.plan(c.ready()))
        await heard_ready_from(a, {"b", "c"}).wait()
        a.hub.lose("a")
        assert [(p.planner, p.names) for p in await plans] == [("b", ["b", "c"])] * 2

    run(test)


def test_survivors_agree_when_the_lost_island_had_voted_to_one_of_them_only() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)

        async def vote_to_a_and_die() -> None:
            plan = await c.agreement.plan(c.ready())
            digest = await c.reduce(plan)
            await c.tell(a, c.vote(plan, digest))
            c.hub.lose("c")

        left, right, _ = await together(a.attempt(), b.attempt(), vote_to_a_and_die())
        assert plans_of([left])[0] == plans_of([right])[0]
        assert a.digest == b.digest

    run(test)


# -- who commits on what --------------------------------------------------------------------------------------


async def ask_outcome(asker: Leader, asked: Leader, plan: Plan) -> bytes:
    body = Question(round=plan.round, attempt=plan.attempt).model_dump_json().encode()
    return await asker.messenger.call(asked.messenger.address, "outcome", body, timeout_seconds=5)


def test_nobody_commits_on_votes_after_having_told_an_asker_that_it_is_open() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc", start_islands=3)
        plans = await together(*(i.agreement.plan(i.ready()) for i in (a, b, c)))
        digests = await together(*(i.reduce(p) for i, p in zip((a, b, c), plans, strict=True)))
        # c has waited for its deadline and asks; on "open" it aborts. Its yes is heard all the same.
        answers = [await ask_outcome(c, i, plans[0]) for i in (a, b)]
        assert answers == [b"open", b"open"]
        for island in (a, b):
            await c.tell(island, c.vote(plans[0], digests[0]))
        outcomes = await together(*(i.agreement.decide(plans[0], d) for i, d in zip((a, b), digests, strict=False)))
        assert outcomes == [False, False]

    run(test)


def test_an_island_that_has_committed_says_so() -> None:
    async def test() -> None:
        a, b = await leaders("ab", start_islands=2)
        (plan, _), _ = await together(a.attempt(), b.attempt())
        assert await ask_outcome(b, a, plan) == b"commit"

    run(test)


def test_competing_plans_do_not_both_start() -> None:
    async def test() -> None:
        # Each of a and b takes the other for lost and offers c a plan of the same round.
        a, b, c = await leaders("abc")
        planned = asyncio.create_task(c.agreement.plan(c.ready()))
        await heard_ready_from(a, {"c"}).wait()
        readies = {"a": a.ready(), "b": b.ready(), "c": c.ready()}
        offers = [make_plan(i.name, attempt, pick(readies, i.name + "c")) for i, attempt in [(a, 0), (b, 1)]]
        accepted, refused = await together(a.tell(c, offers[0]), b.tell(c, offers[1]))
        assert accepted == b"accepted"
        assert isinstance(refused, MessageError) and "'c' has accepted attempt 0" in str(refused)
        assert await planned == offers[0]

    run(test)


def pick(readies: dict, names: str) -> dict:
    return {name: readies[name] for name in names}


def test_a_planner_takes_no_other_plan_while_it_offers_its_own() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        (c,) = await leaders("c", a.hub)
        answer = b.agreement._on_plan
        refusals = []

        async def meanwhile(source: Endpoint, body: bytes) -> bytes:
            rival = make_plan("c", 7, pick({"a": a.ready(), "c": c.ready()}, "ac"))
            try:
                await c.tell(a, rival)
            except MessageError as error:
                refusals.append(str(error))
            return await answer(body)

        b.messenger.serve("plan", meanwhile)
        await c.membership.leave()
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2
        assert refusals == ["'a' has accepted attempt 0"]

    run(test)


def test_an_island_that_is_not_waiting_refuses_a_plan() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        with pytest.raises(MessageError, match="'b' is not ready for round 0"):
            await a.tell(b, make_plan("a", 0, {"a": a.ready(), "b": b.ready()}))

    run(test)


def test_votes_of_far_rounds_are_refused() -> None:
    async def test() -> None:
        a, b = await leaders("ab")
        far = make_plan("a", 0, {"a": a.ready().model_copy(update={"round": 2})})
        with pytest.raises(MessageError, match="round 2, this island is in round 0"):
            await a.tell(b, a.vote(far, None))

    run(test)


# -- islands behind -------------------------------------------------------------------------------------------


def test_an_island_behind_by_a_round_is_told_so() -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        for island in (a, b):
            island.enter(3)
        c.enter(2)
        early = asyncio.gather(a.attempt(), b.attempt())
        with pytest.raises(Behind, match="in round 3, this island in round 2") as caught:
            await c.attempt()
        assert caught.value.donor in {"a", "b"}
        c.enter(3)
        assert plans_of(await early_with(early, c)) == [(0, ["a", "b", "c"], True)] * 3

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
                assert isinstance(result, Behind) and result.donor == min(set("abc") - {name})
            else:
                assert plans_of([result]) == [(0, sorted(set("abc") - {name}), True)]

    run(test)


def test_who_is_in_the_majority_is_not_settled_before_all_have_spoken() -> None:
    async def test() -> None:
        # Of a and b alone, a would be first by name and b would drop a sound state.
        a, b, c = await leaders("abc")
        for island in (a, b, c):
            island.enter(3, OTHER if island is a else START)
        early = asyncio.gather(a.attempt(), b.attempt(), return_exceptions=True)
        await heard_ready_from(c, {"a", "b"}).wait()
        results = await early_with(early, c)
        assert isinstance(results[0], Behind)
        assert plans_of(results[1:]) == [(0, ["b", "c"], True)] * 2

    run(test)


@pytest.mark.parametrize("leave", [lambda i: i.membership.leave(), lambda i: lose(i)], ids=["left", "lost"])
def test_an_island_ahead_that_is_gone_holds_nobody_up(leave: Callable) -> None:
    async def test() -> None:
        a, b, c = await leaders("abc")
        c.enter(1)
        for island in (a, b):
            await c.tell(island, c.ready())
        await leave(c)
        assert plans_of(await together(a.attempt(), b.attempt())) == [(0, ["a", "b"], True)] * 2

    run(test)


async def lose(leader: Leader) -> None:
    leader.hub.lose(leader.name)
