"""One attempt's reduce on one rank: bounded by its deadline, ended early by any participant's no."""

import asyncio
from collections.abc import Mapping

import torch

from outer.deadlines import Deadlines
from outer.errors import MessageError, TransportError
from outer.reduce import Mean, Reducer
from outer.rounds import Plan, Vote, parse
from outer.transports.base import Transport


class Attempts:
    """Connects the participants, runs the reduce, and gives up when it must. State lives on the event loop."""

    def __init__(self, transport: Transport, reducer: Reducer, deadlines: Deadlines) -> None:
        self._transport, self._reducer, self._deadlines = transport, reducer, deadlines
        self._connected: tuple[str, ...] = ()
        self._noes: dict[tuple[int, int], str] = {}
        self._heard_no = asyncio.Event()

    async def run(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, Mean]:
        """The mean of this rank's parts. Raises OuterError; whatever was in flight is dropped then."""
        limit = self._deadlines.limit("reduce")
        work = asyncio.create_task(self._connect_and_reduce(plan, pseudo_grads))
        no = asyncio.create_task(self._wait_for_no(plan))
        try:
            await asyncio.wait({work, no}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            is_done = work.done()
        finally:
            no.cancel()
            work.cancel()
            await asyncio.wait({work, no})
        if is_done and work.exception() is None:
            return work.result()
        self._connected = ()
        await self._transport.disconnect()
        if is_done and (error := work.exception()):
            raise error
        raise TransportError(self._noes.get(plan.key) or f"the reduce took longer than {limit:.0f} s")

    def note_no(self, vote: Vote) -> None:
        """End the attempt that this vote speaks of, now or when it starts."""
        self._noes = {key: cause for key, cause in self._noes.items() if key[0] >= vote.round - 1}
        self._noes[vote.key] = f"island {vote.island!r} voted no: {vote.cause}"
        self._heard_no.set()

    async def on_vote(self, body: bytes) -> bytes:
        """Answers the call `vote` on ranks other than the leader: only a no is sent to them."""
        vote = parse(Vote, body)
        if vote.digest is not None:
            raise MessageError("only a no is sent to this rank")
        self.note_no(vote)
        return b"heard"

    async def _connect_and_reduce(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, Mean]:
        """A group is built when its members change and after every abort, not each round."""
        group = tuple(p.incarnation for p in plan.participants)
        if group != self._connected:
            epoch = f"{plan.round}.{plan.attempt}.{plan.planner}"
            await self._transport.connect(epoch, plan.addresses)
            self._connected = group
        return await self._reducer.run(plan, pseudo_grads)

    async def _wait_for_no(self, plan: Plan) -> None:
        while plan.key not in self._noes:
            self._heard_no.clear()
            await self._heard_no.wait()
