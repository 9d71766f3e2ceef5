"""The all-to-all reduce: every part's mean over the participants, bit-equal on all of them.

For each part one participant is the reducer. The others encode and send it their pseudo-gradient; the reducer
decodes and sums in fp32 in participant order, encodes the mean once, and sends that to all. Everyone, the
reducer too, decodes the same bytes, so a codec's error does not grow with the number of islands. Parts are
pipelined: several are encoded, sent, summed and decoded at the same time.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outer.codecs.base import Codec
from outer.digest import part_digest
from outer.errors import NonFiniteError, OuterError
from outer.merge import WeightedSum, weights_of
from outer.rounds import Plan, unpack_carriers
from outer.space import Space
from outer.transports.base import Endpoint, Phase, Tag, Transport

PARTS_IN_FLIGHT = 16
"""Per rank. More hides a longer round trip and costs memory: parts in flight x participants x part size."""


@dataclass(frozen=True)
class Mean:
    """One part of the reduced mean: fp32 values, and the digest of the bytes they were decoded from."""

    values: torch.Tensor
    digest: bytes


class Reducer:
    """This rank's side of the reduce. `carried` parts go through it; every participant's carriers must run it."""

    def __init__(self, transport: Transport, codec: Codec, space: Space, me: Endpoint) -> None:
        self._transport, self._codec, self._space, self._me = transport, codec, space, me

    async def run(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, Mean]:
        """The mean of each carried part. The caller bounds the time. Raises TransportError or NonFiniteError.

        Parts start in ascending order on every rank, so the lowest unfinished part is always in flight at all of
        its carriers, and no two ranks can wait for each other.
        """
        attempt = _Attempt(self._transport, self._codec, self._space, self._me, plan)
        gate = asyncio.Semaphore(PARTS_IN_FLIGHT)
        means: dict[int, Mean] = {}

        async def one(part: int) -> None:
            try:
                means[part] = await attempt.reduce(part, pseudo_grads[part])
            finally:
                gate.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                for part in sorted(pseudo_grads):
                    await gate.acquire()
                    tasks.create_task(one(part))
        except BaseExceptionGroup as group:
            raise _first_cause(group) from None
        return means


class _Attempt:
    """One attempt at a round, as one rank sees it."""

    def __init__(self, transport: Transport, codec: Codec, space: Space, me: Endpoint, plan: Plan) -> None:
        self._transport, self._codec, self._space, self._me, self._plan = transport, codec, space, me, plan
        self._weights = weights_of([p.tokens for p in plan.participants])
        self._carriers = {p.island: unpack_carriers(p.carriers) for p in plan.participants}

    async def reduce(self, part: int, pseudo_grad: torch.Tensor) -> Mean:
        payload = await asyncio.to_thread(self._encode, part, pseudo_grad)
        reducer = self._plan.names[part % len(self._plan.names)]
        if reducer == self._me.island:
            mean = await self._sum(part, payload)
            await self._send_to_all(part, mean)
        else:
            await self._transport.send(self._endpoint(reducer, part), self._tag(Phase.REDUCE, part), payload)
            mean = await self._receive(reducer, Phase.GATHER, part)
        return await asyncio.to_thread(self._decode_mean, part, mean)

    async def _sum(self, part: int, own: torch.Tensor) -> torch.Tensor:
        """The encoded weighted mean, summed in participant order whatever order the payloads come in."""
        others = [name for name in self._plan.names if name != self._me.island]
        async with asyncio.TaskGroup() as tasks:
            coming = {name: tasks.create_task(self._receive(name, Phase.REDUCE, part)) for name in others}
        payloads = [own if name == self._me.island else coming[name].result() for name in self._plan.names]
        return await asyncio.to_thread(self._mean_of, part, payloads)

    def _mean_of(self, part: int, payloads: list[torch.Tensor]) -> torch.Tensor:
        num_elements = self._space.parts[part].num_elements
        total = WeightedSum(num_elements)
        for payload, weight in zip(payloads, self._weights, strict=True):
            total.add(self._codec.decode(payload, num_elements), weight)
        return self._codec.encode(total.result())

    async def _send_to_all(self, part: int, payload: torch.Tensor) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in self._plan.names:
                if name != self._me.island:
                    tag = self._tag(Phase.GATHER, part)
                    tasks.create_task(self._transport.send(self._endpoint(name, part), tag, payload))

    async def _receive(self, island: str, phase: Phase, part: int) -> torch.Tensor:
        num_bytes = self._codec.num_bytes(self._space.parts[part].num_elements)
        return await self._transport.recv(self._endpoint(island, part), self._tag(phase, part), num_bytes)

    def _encode(self, part: int, values: torch.Tensor) -> torch.Tensor:
        try:
            return self._codec.encode(values)
        except NonFiniteError as error:
            name = self._space.name_at(self._space.parts[part].start + error.index)
            raise OuterError(f"the pseudo-gradient of {name!r} holds {error.value}") from None

    def _decode_mean(self, part: int, payload: torch.Tensor) -> Mean:
        values = self._codec.decode(payload, self._space.parts[part].num_elements)
        return Mean(values, part_digest(payload))

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
