"""Whom an island tells its status, and when."""

import asyncio
from collections import Counter
from collections.abc import Callable
from string import ascii_letters

from outer.agreement.messages import Status
from outer.agreement.running.failure_detector import MAX_TRAINING_PINGS, PING_SECONDS
from outer.transports.loopback import Hub, Parcel
from tests.outer.clock import run
from tests.outer.leaders import START, leaders

OTHER = "bb" * 16


def test_all_of_many_islands_are_told_at_once_of_a_status_that_somebody_may_wait_for() -> None:
    async def test() -> None:
        first, *others = await leaders(ascii_letters[:40])
        taking = Status(round=0, tokens=0, digest=START, is_coming=False)
        for status in (taking, Status(round=1, tokens=9, digest=OTHER)):
            await first.driver.update_status(status)
            await asyncio.sleep(0.1 * PING_SECONDS)
            assert all(other.knowledge.statuses[first.name] == status for other in others)

    run(test)


def test_many_islands_before_the_first_commit_ping_some_each_second_and_all_in_turn() -> None:
    pinged: Counter[tuple[str, str]] = Counter()

    def deliver(parcel: Parcel, at_once: Callable[[], None]) -> None:
        if parcel.kind == "status":
            pinged[parcel.source, parcel.to] += 1
        at_once()

    async def test() -> None:
        await leaders(ascii_letters[:40], Hub(deliver))
        await asyncio.sleep(0.5 * PING_SECONDS)
        assert 0 < sum(pinged.values()) <= 40 * MAX_TRAINING_PINGS  # the first status
        await asyncio.sleep(2 * PING_SECONDS)
        assert 40 * MAX_TRAINING_PINGS < sum(pinged.values()) <= 40 * 3 * MAX_TRAINING_PINGS
        assert len(pinged) == 40 * 39

    run(test)
