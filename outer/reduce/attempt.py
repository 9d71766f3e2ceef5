"""One attempt's reduce on one rank: bounded by its deadline, ended early by any participant's no."""

import asyncio
from collections.abc import Mapping

import torch

from outer.deadlines import Deadlines
from outer.errors import MessageError, TransportError
from outer.payloads import Mean
from outer.reduce import Reducer
from outer.rounds import Plan, Vote, parse
from outer.transports.base import Endpoint, Transport

MAX_PLANS = 64
"""Plans whose noes are remembered before this island takes part in them."""


class Attempts:
    """Connects the participants, runs the reduce, and gives up when it must. State lives on the event loop."""

    def __init__(self, transport: Transport, reducer: Reducer, deadlines: Deadlines) -> None:
        self._transport, self._reducer, self._deadlines = transport, reducer, deadlines
        self.epoch = ""
        """The group this rank is connected in, "" for none; the same on every rank of an island between attempts."""
        self._group: tuple[str, ...] = ()
        self._noes: dict[str, dict[str, str]] = {}
        """By plan: who voted no, and why."""
        self._heard_no = asyncio.Event()

    async def run(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, Mean]:
        """The mean of this rank's parts. Raises OuterError; whatever was in flight is dropped then."""
        limit = self._deadlines.limit("reduce")
        self._noes = {plan.id: self._noes.get(plan.id, {})}
        work = asyncio.create_task(self._connect_and_reduce(plan, pseudo_grads))
        no = asyncio.create_task(self._wait_for_no(plan))
        try:
            await asyncio.wait({work, no}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            is_done = work.done()
        finally:
            no.cancel()
            work.cancel()
            await asyncio.wait({work, no})
        # Asked in any case: asyncio complains of errors that nobody has looked at.
        error = None if work.cancelled() else work.exception()
        if is_done and error is None:
            return work.result()
        await self._disconnect()
        if is_done and error is not None:
            raise error
        raise TransportError(self.no_to(plan) or f"the reduce took longer than {limit:.0f} s")

    async def drop(self) -> None:
        """Every rank calls it after an attempt that did not commit: some participants have left the group."""
        if self.epoch:
            await self._disconnect()

    def note_no(self, plan: str, island: str, cause: str) -> None:
        """End the attempt at this plan, now or when it starts."""
        if plan in self._noes or len(self._noes) < MAX_PLANS:
            self._noes.setdefault(plan, {})[island] = cause
            self._heard_no.set()

    def no_to(self, plan: Plan) -> str | None:
        """Why the attempt is off, if one of its participants has said so or is lost."""
        noes = self._noes.get(plan.id, {})
        return next((f"island {name!r}: {noes[name]}" for name in plan.names if name in noes), None)

    async def on_vote(self, source: Endpoint, body: bytes) -> bytes:
        """Answers the call `vote` on ranks other than the leader: only a no is sent to them."""
        vote = parse(Vote, body)
        if vote.digest is not None or vote.island != source.island:
            raise MessageError("only an island's own no is sent to this rank")
        self.note_no(vote.plan, vote.island, vote.cause)
        return b"heard"

    async def _disconnect(self) -> None:
        self.epoch, self._group = "", ()
        await self._transport.disconnect()

    async def _connect_and_reduce(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, Mean]:
        """A group lasts until its members change or an attempt fails; the plan tells all of them the same of it."""
        group = tuple(p.incarnation for p in plan.participants)
        is_lasting = self.epoch and group == self._group and all(p.epoch == self.epoch for p in plan.participants)
        if not is_lasting:
            epoch = plan.id
            await self._transport.connect(epoch, plan.addresses)
            self.epoch, self._group = epoch, group
        return await self._reducer.run(plan, pseudo_grads)

    async def _wait_for_no(self, plan: Plan) -> None:
        while self.no_to(plan) is None:
            self._heard_no.clear()
            await self._heard_no.wait()
