import asyncio

import pytest

from outer.network.event_loop import ChangeSignal
from outer.network.retry import retry, retry_blocking


def test_a_retry_ends_with_the_first_result_that_is_true():
    replies = iter([None, 0, "ready", "later"])

    async def ask() -> object:
        return next(replies)

    assert asyncio.run(retry(ask, seconds=60, pause_seconds=0)) == "ready"
    replies = iter([None, 0, "ready", "later"])
    assert retry_blocking(lambda: next(replies), seconds=60, pause_seconds=0) == "ready"


def test_a_retry_without_time_makes_one_attempt_and_returns_its_result():
    calls = []

    async def ask() -> list[int]:
        calls.append(1)
        return []

    assert asyncio.run(retry(ask, seconds=0, pause_seconds=60)) == []
    assert retry_blocking(lambda: calls.append(1), seconds=0, pause_seconds=60) is None
    assert len(calls) == 2


def test_an_error_of_an_attempt_ends_the_retry():
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(retry(fail, seconds=60, pause_seconds=0))


def test_a_change_wakes_every_task_that_waits_for_its_condition():
    async def main() -> None:
        signal, state = ChangeSignal(), set()
        waits = [
            asyncio.create_task(signal.wait_until(lambda n=n: n in state, 60)) for n in range(3)
        ]
        await asyncio.sleep(0)
        state.update({0, 1})
        signal.notify()
        await asyncio.wait(waits, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        state.add(2)
        signal.notify()
        assert await asyncio.gather(*waits) == [True, True, True]

    asyncio.run(main())


def test_a_condition_that_does_not_come_true_in_time_is_told_so():
    async def main() -> None:
        assert not await ChangeSignal().wait_until(lambda: False, 0.01)

    asyncio.run(main())
