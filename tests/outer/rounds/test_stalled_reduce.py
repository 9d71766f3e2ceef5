"""Whole islands whose reduce takes too long while nobody alone is to blame for it."""

import asyncio
from collections.abc import Mapping

import torch

from outer.agreement.messages import Plan
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint
from outer.rounds.island_reduce import ReduceResult
from outer.transports.base import Transport
from outer.transports.loopback import Hub
from tests.outer.islands import ForwardingTransport, Island, run_islands
from tests.outer.rounds.test_audited_rounds import config, reduce_of

REDUCE_SECONDS = 0.2


class NeverConnects(ForwardingTransport):
    """A transport whose group never comes together, as with participants that join a plan and do
    nothing.
    """

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await asyncio.Event().wait()


def never_connects(hub: Hub, inner: Transport) -> Transport:
    return NeverConnects(inner)


def first_result(island: Island) -> ReduceResult:
    """What the reduce of the first attempt ends with."""
    found: list[ReduceResult] = []
    reduce = reduce_of(island)
    reduce.attempts._deadlines = Deadlines(REDUCE_SECONDS)
    run = reduce.run

    def recorded(plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> ReduceResult:
        found.append(run(plan, pseudo_grads))
        return found[-1]

    reduce.run = recorded  # type: ignore[method-assign]
    island.outer.begin()
    island.train(0)
    island.attempt(100)
    return found[0]


def test_a_reduce_that_takes_too_long_is_stalled_so_that_who_does_not_vote_is_left_out() -> None:
    faults = dict.fromkeys("abc", never_connects)
    found = run_islands(dict.fromkeys("abc", first_result), config(3, audit=0.0), faults=faults)
    # The first that gives up closes its group, which may end the wait of the others.
    stalled = [result for result in found.values() if result.is_stalled]
    assert stalled and all(result.at_fault is None for result in stalled)
    assert all(result.mean_norm is None for result in found.values())
