"""Which endpoints connect for a reduce: those that share parts, directly or through others."""

import asyncio

import pytest

from outer.agreement.messages import Plan
from outer.network.endpoints import Endpoint
from outer.network.messages import pack_carriers
from outer.reduce.attempt import find_partners
from outer.transports.loopback import Hub
from tests.outer.leaders import Leader

NUM_PARTS = 4


def plan_of(**carriers: list[int]) -> Plan:
    """A plan whose islands have these carriers of four parts, and a rank more than the highest of
    them.
    """
    hub, readies = Hub(), []
    for name, ranks in carriers.items():
        island = Leader(hub, name, num_ranks=max(ranks) + 2)
        readies.append(island.ready().model_copy(update={"carriers": pack_carriers(ranks)}))
    return Plan(round=0, attempt=0, planner=readies[0].island, participants=readies)


def partners(plan: Plan, island: str, rank: int) -> set[str]:
    return {str(endpoint) for endpoint in find_partners(plan, Endpoint(island, rank))}


async def plan_here(**carriers: list[int]) -> Plan:
    return plan_of(**carriers)


EQUAL = {"a": [0, 0, 1, 1], "b": [0, 0, 1, 1], "c": [0, 0, 1, 1]}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_equal_meshes_connects_with_its_equals(rank: int) -> None:
    plan = asyncio.run(plan_here(**EQUAL))
    assert partners(plan, "a", rank) == {f"{name}/{rank}" for name in "abc"}


def test_a_rank_that_carries_nothing_connects_with_nobody() -> None:
    assert partners(asyncio.run(plan_here(**EQUAL)), "a", 2) == {"a/2"}


def test_unequal_meshes_connect_through_one_another() -> None:
    plan = asyncio.run(plan_here(a=[0, 0, 0, 0], b=[0, 0, 1, 1]))
    assert partners(plan, "b", 1) == {"a/0", "b/0", "b/1"}


def test_all_partners_find_the_same_ones() -> None:
    # 0 of a shares a part with 0 of b, and that one with 1 of a; the third part keeps to itself.
    plan = asyncio.run(plan_here(a=[0, 1, 2, 2], b=[0, 0, 1, 1]))
    assert (
        partners(plan, "a", 0)
        == partners(plan, "b", 0)
        == partners(plan, "a", 1)
        == {"a/0", "a/1", "b/0"}
    )
    assert partners(plan, "a", 2) == partners(plan, "b", 1) == {"a/2", "b/1"}
