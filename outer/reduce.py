"""The all-to-all reduce: every part's mean over the participants, bit-equal on all of them.

For each part one participant is the reducer. The others encode and send it their pseudo-gradient; the reducer
decodes and sums in fp32 in participant order, encodes the mean once, and sends that to all. Everyone, the
reducer too, decodes the same bytes, so a codec's error does not grow with the number of islands. Parts are
pipelined: several are encoded, sent, summed and decoded at the same time.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outer.codecs.base import Codec
from outer.digest import part_digest
from outer.errors import NonFiniteError, OuterError
from outer.merge import WeightedSum, weights_of
from outer.phases import NO_HOOKS, Hooks
from outer.phases import Phase as RoundPhase
from outer.rounds import Plan, unpack_carriers
from outer.space import Space
from outer.transports.base import Endpoint, Phase, Tag, Transport

PARTS_IN_FLIGHT = 48
"""Per rank. Links idle when too few are left to one of many peers; it costs memory: parts in flight x part size."""


@dataclass(frozen=True)
class Mean:
    """One part of the reduced mean: fp32 values, and the digest of the bytes they were decoded from."""

    values: torch.Tensor
    digest: bytes


class Reducer:
    """This rank's side of the reduce. `carried` parts go through it; every participant's carriers must run it."""

    def __init__(self, transport: Transport, codec: Codec, space: Space, me: Endpoint, hooks: Hooks = NO_HOOKS) -> None:
        self._transport, self._codec, self._space, self._me, self._hooks = transport, codec, space, me, hooks

    async def run(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, Mean]:
        """The mean of each carried part. The caller bounds the time. Raises TransportError or NonFiniteError.

        A part starts, and its receives are posted, when all parts PARTS_IN_FLIGHT before it are done. So whatever an
        unfinished part waits for stands behind nothing but parts that its receiver has started too: no two ranks
        can wait for each other, even where a transport lets few payloads through at a time.
        """
        attempt = _Attempt(self._transport, self._codec, self._space, self._me, self._hooks, plan)
        self._hooks.reached("send", plan.round)
        started: dict[int, asyncio.Task[Mean]] = {}
        window: deque[int] = deque()
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in sorted(pseudo_grads):
                    while window and window[0] <= part - PARTS_IN_FLIGHT:
                        await asyncio.wait([started[window.popleft()]])
                    started[part] = tasks.create_task(attempt.reduce(part, pseudo_grads[part]))
                    window.append(part)
        except BaseExceptionGroup as group:
            raise _first_cause(group) from None
        return {part: task.result() for part, task in started.items()}


class _Attempt:
    """One attempt at a round, as one rank sees it."""

    def __init__(
        self, transport: Transport, codec: Codec, space: Space, me: Endpoint, hooks: Hooks, plan: Plan
    ) -> None:
        self._transport, self._codec, self._space, self._me, self._plan = transport, codec, space, me, plan
        self._hooks = hooks
        self._reached: set[RoundPhase] = set()
        self._weights = weights_of([p.tokens for p in plan.participants])
        self._others = [name for name in plan.names if name != me.island]
        self._carriers = {p.island: unpack_carriers(p.carriers) for p in plan.participants}

    async def reduce(self, part: int, pseudo_grad: torch.Tensor) -> Mean:
        """One part's mean, when this rank is done with the part."""
        reducer = self._plan.names[part % len(self._plan.names)]
        if reducer == self._me.island:
            payload = await self._as_reducer(part, pseudo_grad)
        else:
            payload = await self._as_sender(part, pseudo_grad, reducer)
        mean = await asyncio.to_thread(self._decode_mean, part, payload)
        self._reach("reducing")
        return mean

    async def _as_reducer(self, part: int, pseudo_grad: torch.Tensor) -> torch.Tensor:
        """The encoded weighted mean, summed in participant order whatever order the payloads come in."""
        async with asyncio.TaskGroup() as tasks:
            coming = {name: tasks.create_task(self._receive(name, Phase.REDUCE, part)) for name in self._others}
            own = await asyncio.to_thread(self._encode, part, pseudo_grad)
        payloads = [own if name == self._me.island else coming[name].result() for name in self._plan.names]
        mean = await asyncio.to_thread(self._mean_of, part, payloads)
        async with asyncio.TaskGroup() as tasks:
            for name in self._others:
                tasks.create_task(self._send(name, Phase.GATHER, part, mean))
        return mean

    async def _as_sender(self, part: int, pseudo_grad: torch.Tensor, reducer: str) -> torch.Tensor:
        """The encoded mean, as the reducer sends it."""
        async with asyncio.TaskGroup() as tasks:
            # Posted before anything is sent: gloo tells the other side of it behind what is being sent.
            mean = tasks.create_task(self._receive(reducer, Phase.GATHER, part))
            payload = await asyncio.to_thread(self._encode, part, pseudo_grad)
            await self._send(reducer, Phase.REDUCE, part, payload)
        return mean.result()

    def _mean_of(self, part: int, payloads: list[torch.Tensor]) -> torch.Tensor:
        num_elements = self._space.parts[part].num_elements
        total = WeightedSum(num_elements)
        for payload, weight in zip(payloads, self._weights, strict=True):
            total.add(self._codec.decode(payload, num_elements), weight)
        return self._codec.encode(total.result())

    async def _send(self, island: str, phase: Phase, part: int, payload: torch.Tensor) -> None:
        payload = self._hooks.payload(self._plan.round, payload)
        await self._transport.send(self._endpoint(island, part), self._tag(phase, part), payload)
        self._reach("sending")

    async def _receive(self, island: str, phase: Phase, part: int) -> torch.Tensor:
        num_bytes = self._codec.num_bytes(self._space.parts[part].num_elements)
        return await self._transport.recv(self._endpoint(island, part), self._tag(phase, part), num_bytes)

    def _encode(self, part: int, values: torch.Tensor) -> torch.Tensor:
        try:
            return self._codec.encode(self._hooks.pseudo_grad(self._plan.round, values))
        except NonFiniteError as error:
            name = self._space.name_at(self._space.parts[part].start + error.index)
            raise OuterError(f"the pseudo-gradient of {name!r} holds {error.value}") from None

    def _decode_mean(self, part: int, payload: torch.Tensor) -> Mean:
        values = self._codec.decode(payload, self._space.parts[part].num_elements)
        return Mean(values, part_digest(payload))

    def _reach(self, phase: RoundPhase) -> None:
        if phase not in self._reached:
            self._reached.add(phase)
            self._hooks.reached(phase, self._plan.round)

    def _endpoint(self, island: str, part: int) -> Endpoint:
        return Endpoint(island, self._carriers[island][part])

    def _tag(self, phase: Phase, part: int) -> Tag:
        return Tag(self._plan.round, self._plan.attempt, phase, part)


def _first_cause(group: BaseExceptionGroup) -> BaseException:
    """The first error in a group of groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
