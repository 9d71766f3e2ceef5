"""The reduce of one attempt ends at its deadline, at a participant's no vote, or with the mean."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from outer.agreement.messages import Plan, Vote
from outer.errors import DeadlineError, MessageError, PeerLost, TransportError
from outer.network.endpoints import Endpoint
from outer.reduce.attempt import MAX_PLANS, RENEW_SECONDS, Attempts
from outer.transports.loopback import Hub, Parcel
from tests.outer.clock import now, run
from tests.outer.leaders import Leader, together


def islands(names: str, **options: Any) -> list[Leader]:
    hub = Hub()
    return [Leader(hub, name, **options) for name in names]


def plan_of(*participants: Leader, attempt: int = 0) -> Plan:
    readies = [p.ready() for p in participants]
    return Plan(round=0, attempt=attempt, planner=participants[0].name, participants=readies)


def test_all_participants_get_one_mean() -> None:
    async def test() -> None:
        a, b = islands("ab")
        plan = plan_of(a, b)
        left, right = await together(a.reduce(plan), b.reduce(plan))
        assert isinstance(left, str)
        assert left == right

    run(test)


def test_a_group_lasts_while_its_members_are_the_same() -> None:
    async def test() -> None:
        a, b = islands("ab")
        epochs = []
        for attempt in range(2):
            plan = plan_of(a, b, attempt=attempt)
            await asyncio.gather(a.reduce(plan), b.reduce(plan))
            epochs += [a.attempts.epoch, b.attempts.epoch]
        assert len(set(epochs)) == 1

    run(test)


async def epochs_of_two_reduces(names: str, seconds: float, *, is_uneven: bool) -> list[str]:
    """Of islands whose payloads take `seconds`, over a transport whose connections get uneven, or
    not.
    """

    def deliver_late(parcel: Parcel, deliver: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds if parcel.kind == "payload" else 0, deliver)

    hub = Hub(deliver_late)
    all_islands, epochs = [Leader(hub, name) for name in names], []
    for island in all_islands:
        island.ranks[0].transport.is_uneven = is_uneven
    for attempt in range(2):
        plan = plan_of(*all_islands, attempt=attempt)
        await asyncio.gather(*(island.reduce(plan) for island in all_islands))
        epochs.append(all_islands[0].attempts.epoch)
    return epochs


@pytest.mark.parametrize(
    "names,seconds,is_uneven,connects_anew",
    [
        pytest.param("abc", RENEW_SECONDS, True, True, id="three islands and a long reduce"),
        pytest.param("abc", RENEW_SECONDS / 8, True, False, id="a short reduce"),
        pytest.param("ab", RENEW_SECONDS, True, False, id="two islands"),
        pytest.param("abc", RENEW_SECONDS, False, False, id="a transport that shares evenly"),
    ],
)
def test_a_group_whose_connections_share_slow_links_unevenly_is_renewed(
    names: str, seconds: float, is_uneven: bool, connects_anew: bool
) -> None:
    async def test() -> None:
        first, second = await epochs_of_two_reduces(names, seconds, is_uneven=is_uneven)
        assert (first != second) is connects_anew

    run(test)


def test_a_member_that_has_dropped_out_makes_all_connect_anew() -> None:
    async def test() -> None:
        a, b = islands("ab")
        await asyncio.gather(*(i.reduce(plan_of(a, b)) for i in (a, b)))
        first = a.attempts.epoch
        await b.attempts.drop()
        plan = plan_of(a, b, attempt=1)
        await asyncio.gather(a.reduce(plan), b.reduce(plan))
        assert a.attempts.epoch == b.attempts.epoch != first

    run(test)


def test_another_incarnation_of_a_member_makes_all_connect_anew() -> None:
    async def test() -> None:
        a, b = islands("ab")
        await asyncio.gather(*(i.reduce(plan_of(a, b)) for i in (a, b)))
        first = a.attempts.epoch
        again = Leader(a.hub, "b", incarnation="01")
        again.attempts.epoch = first  # What an impostor or a bug would claim.
        plan = plan_of(a, again, attempt=1)
        await asyncio.gather(a.reduce(plan), again.reduce(plan))
        assert a.attempts.epoch == again.attempts.epoch != first

    run(test)


def test_a_reduce_ends_at_its_deadline_and_leaves_its_group() -> None:
    async def test() -> None:
        a, b = islands("ab", wait_seconds=20.0)
        await asyncio.gather(*(i.reduce(plan_of(a, b)) for i in (a, b)))
        assert a.attempts.epoch
        with pytest.raises(TransportError, match="the reduce took longer than 20 s"):
            await a.reduce(plan_of(a, b, attempt=1))
        assert now() == 20
        assert a.attempts.epoch == ""

    run(test)


@pytest.mark.parametrize("is_early", [True, False], ids=["before the reduce", "in the reduce"])
def test_a_no_ends_the_attempt(is_early: bool) -> None:
    async def test() -> None:
        a, b = islands("ab")
        plan = plan_of(a, b)
        if is_early:
            a.attempts.record_no_vote(plan.id, "b", "disk full")
        running = asyncio.create_task(a.reduce(plan))
        await asyncio.sleep(1)
        a.attempts.record_no_vote(plan.id, "b", "disk full")
        with pytest.raises(TransportError, match="island 'b': disk full"):
            await running
        assert now() == 1

    run(test)


def test_a_no_to_another_plan_or_of_an_outsider_does_not() -> None:
    async def test() -> None:
        a, b = islands("ab")
        plan = plan_of(a, b)
        a.attempts.record_no_vote(plan_of(a, b, attempt=1).id, "b", "disk full")
        a.attempts.record_no_vote(plan.id, "q", "boo")
        left, right = await together(a.reduce(plan), b.reduce(plan))
        assert left == right

    run(test)


def test_no_votes_on_endless_plans_are_not_remembered() -> None:
    async def test() -> None:
        (a,) = islands("a")
        for number in range(10 * MAX_PLANS):
            a.attempts.record_no_vote(f"{number:032x}", "b", "boo")
        assert len(a.attempts._no_votes) == MAX_PLANS

    run(test)


def test_a_lost_peers_error_is_what_is_raised() -> None:
    async def test() -> None:
        a, b = islands("ab")
        a.hub.lose("b")
        with pytest.raises(PeerLost, match="island 'b' is lost"):
            await a.reduce(plan_of(a, b))

    run(test)


def test_only_an_islands_own_no_is_taken_from_another_island() -> None:
    async def test() -> None:
        a, b = islands("ab")
        plan = plan_of(a, b)

        async def say(vote: Vote) -> bytes:
            return await a.attempts.on_vote(Endpoint("b", 0), vote.model_dump_json().encode())

        for vote in (Vote.yes(plan, "b", "11" * 8), Vote.no(plan, "a", "boo")):
            with pytest.raises(MessageError, match="only an island's own no"):
                await say(vote)
        assert a.attempts.find_no_vote(plan) is None
        await say(Vote.no(plan, "b", "disk full"))
        assert a.attempts.find_no_vote(plan) == "island 'b': disk full"

    run(test)


class BreaksOnCancel:
    """A transport whose connection breaks at the moment the attempt is abandoned."""

    def __init__(self) -> None:
        self.is_waiting = asyncio.Event()

    async def connect(self, epoch: str, addresses: dict[Endpoint, str]) -> None:
        self.is_waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise DeadlineError("too late") from None

    async def disconnect(self) -> None:
        pass


def test_an_abort_leaves_no_error_that_nobody_has_looked_at() -> None:
    async def test() -> None:
        unseen: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: unseen.append(context)
        )
        a, b = islands("ab")
        transport, plan = BreaksOnCancel(), plan_of(a, b)
        attempts = Attempts(transport, a.ranks[0].reducer, a.deadlines)  # pyright: ignore[reportArgumentType]
        running = asyncio.create_task(attempts.run(plan, {}))
        await transport.is_waiting.wait()
        attempts.record_no_vote(plan.id, "b", "disk full")
        (error,) = await together(running)
        assert isinstance(error, TransportError)
        assert "island 'b': disk full" in str(error)
        # What is thrown away with the attempt is what would complain.
        del running, error
        await asyncio.sleep(0)  # One turn: the event loop, too, lets go of it.
        gc.collect()
        assert not unseen

    run(test)
