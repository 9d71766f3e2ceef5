"""Six islands, of which one coordinates each round after the first, while islands die, freeze and
come.
"""

import asyncio

import pytest

from outer.agreement.messages import Plan
from tests.outer.clock import run, until
from tests.outer.leaders import Fault, Leader, die, freeze, leaders, plans_of, together, wake

NAMES = "abcdef"


async def after_a_round(**options: object) -> list[Leader]:
    islands = await leaders(NAMES, start_islands=len(NAMES), **options)
    await together(*(island.attempt() for island in islands))
    assert {island.round for island in islands} == {1}
    return islands


def test_rounds_commit_with_one_coordinator() -> None:
    async def test() -> None:
        islands = await after_a_round()
        for _ in range(3):
            assert [island.protocol.coordination.coordinator for island in islands] == ["a"] * len(
                NAMES
            )
            results = await together(*(island.attempt() for island in islands))
            assert plans_of(results) == [(0, list(NAMES), True)] * len(NAMES)
        assert len({island.digest for island in islands}) == 1
        heard = islands[1].protocol.readies.latest
        assert {ready.round for name, ready in heard.items() if name != "b"} == {0}, (
            "later ones went to the coordinator"
        )

    run(test)


@pytest.mark.parametrize("fault", [die, freeze])
@pytest.mark.parametrize("when", ["in_reduce", "before_vote"])
@pytest.mark.parametrize("victim", [0, 3], ids=["the coordinator", "another"])
def test_the_others_commit_when_an_island_dies_or_freezes(
    victim: int, when: str, fault: Fault
) -> None:
    async def test() -> None:
        islands = await after_a_round()
        others = [island for island in islands if island is not islands[victim]]
        dying = asyncio.create_task(together(islands[victim].attempt(**{when: fault})))
        await together(*(island.attempt_until_committed() for island in others))
        assert {island.round for island in others} == {2}
        assert len({island.digest for island in others}) == 1
        dying.cancel()

    run(test)


def test_a_coordinator_that_dies_while_all_wait_for_it_holds_up_nobody() -> None:
    async def test() -> None:
        islands = await after_a_round()
        waiting = asyncio.gather(*(island.attempt_until_committed() for island in islands[1:]))
        await asyncio.sleep(5)
        islands[0].hub.lose("a")
        plans = await waiting
        assert {tuple(plan.names) for plan in plans} == {tuple("bcdef")}

    run(test)


def test_a_frozen_coordinator_holds_up_nobody_and_takes_part_again() -> None:
    async def test() -> None:
        islands = await after_a_round()
        freeze(islands[0])
        plans: list[Plan] = await asyncio.gather(
            *(island.attempt_until_committed() for island in islands[1:])
        )
        assert {tuple(plan.names) for plan in plans} == {tuple("bcdef")}
        await wake(islands[0])
        await until(lambda: islands[0].knowledge.behind(is_settled=False) is not None)
        islands[0].take_state(islands[1])
        results = await together(*(island.attempt() for island in islands))
        assert plans_of(results) == [(0, list(NAMES), True)] * len(NAMES)

    run(test)


def test_an_island_that_comes_is_in_the_next_plan() -> None:
    async def test() -> None:
        islands = await after_a_round()
        (new,) = await leaders("A", islands[0].hub)
        new.take_state(islands[2])
        results = await together(*(island.attempt() for island in [new, *islands]))
        assert plans_of(results) == [(0, ["A", *NAMES], True)] * 7

    run(test)


def test_the_last_to_hear_of_the_commit_is_waited_for_at_the_end() -> None:
    async def test() -> None:
        islands = await after_a_round()
        assert islands[2].knowledge.presumed
        assert await islands[2].driver.linger(60) is False
        assert not islands[2].knowledge.presumed

    run(test)
