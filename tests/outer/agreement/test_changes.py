"""Reports of many islands are looked at together, everything else at once."""

import asyncio

import pytest

from outer.agreement.running.changes import FEW_ISLANDS, VOTE_SECONDS, Changes
from tests.outer.clock import now, run
from tests.outer.protocols import node


def changes_among(num_others: int) -> Changes:
    """Of an island that knows so many others."""
    return Changes(node("a", [f"island-{i}" for i in range(num_others)]).knowledge)


async def count_looks(changes: Changes, num_reports: int) -> int:
    """How often something that looks after every change looks while reports arrive, one each 0.1
    ms.
    """
    num_looks = 0

    async def look() -> None:
        nonlocal num_looks
        while True:
            await changes.wait(60.0)
            num_looks += 1

    looking = asyncio.create_task(look())
    for _ in range(num_reports):
        changes.add_report()
        await asyncio.sleep(1e-4)
    await asyncio.sleep(1.0)
    looking.cancel()
    return num_looks


def test_among_few_islands_each_report_is_looked_at() -> None:
    async def test() -> None:
        assert await count_looks(changes_among(FEW_ISLANDS), FEW_ISLANDS) == FEW_ISLANDS

    run(test)


def test_reports_of_many_islands_are_looked_at_together() -> None:
    async def test() -> None:
        assert await count_looks(changes_among(100), 100) == 1

    run(test)


def test_a_report_among_many_islands_is_looked_at_soon() -> None:
    async def test() -> None:
        changes, before = changes_among(100), now()
        changes.add_report()
        await changes.wait(60.0)
        assert now() - before < 0.1

    run(test)


def test_votes_among_many_islands_are_looked_at_sooner() -> None:
    async def test() -> None:
        changes, before = changes_among(100), now()
        changes.add_report()
        changes.add_report(VOTE_SECONDS)
        changes.add_report()
        await changes.wait(60.0)
        assert now() - before == pytest.approx(100 * VOTE_SECONDS, rel=0.1)

    run(test)


def test_a_change_that_is_no_report_is_looked_at_at_once() -> None:
    async def test() -> None:
        changes, before = changes_among(100), now()
        changes.add_report()
        changes.add()
        await changes.wait(60.0)
        assert now() == before

    run(test)
