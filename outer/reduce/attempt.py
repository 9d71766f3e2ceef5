"""The reduce of one attempt on one rank, limited by a deadline and ended early by any
participant's no vote.
"""

import asyncio
from collections.abc import Mapping

import torch

from outer.agreement.messages import Plan, Vote
from outer.audits.commitments import Commitments
from outer.audits.kept_payloads import KeptPayloads
from outer.codecs.choice import CodecChoice
from outer.config import OuterConfig
from outer.connect.settings import Network
from outer.errors import DeadlineError, MessageError, StalledError, TransportError
from outer.hooks import Hooks
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint, Leg
from outer.network.event_loop import assert_on_loop, loop_time
from outer.network.messages import receive, unpack_carriers
from outer.reduce.auditor import Auditor
from outer.reduce.payloads import Mean
from outer.reduce.reducer import DigestAfter, Reducer
from outer.space.layout import Space
from outer.transports.base import Transport

RENEW_SECONDS = 8.0
"""If the last reduce took longer than this, a new group may be worth the time to connect."""
MAX_PLANS = 64
"""Limit for the number of plans whose no votes are remembered before this island takes part in
them."""


class Attempts:
    """Connects the participants and runs the reduce of each attempt. Its state is used on the event
    loop only.
    """

    def __init__(
        self,
        transport: Transport,
        reducer: Reducer,
        deadlines: Deadlines,
        auditor: Auditor | None = None,
    ) -> None:
        """Create the attempts of a rank. `auditor` audits some of the means that have arrived;
        None if there are no audits.
        """
        self._transport = transport
        self.reducer = reducer
        self._deadlines = deadlines
        self._auditor = auditor
        self.num_audited = 0
        """Number of parts that this rank audited in the last attempt."""
        self.epoch = ""
        """Id of the transport group in which this rank is connected, or "". All ranks of an
        island agree on it between attempts."""
        self._members: tuple[str, ...] = ()
        self._seconds = 0.0
        """Duration of the last successful reduce in seconds."""
        self._no_votes: dict[str, dict[str, str]] = {}
        """Causes of no votes, by plan and island."""
        self._no_vote_arrived = asyncio.Event()

    @property
    def offered_epoch(self) -> str:
        """The epoch in which this island offers to continue. If it is "", all participants of the
        next plan connect again.

        TCP divides a link among connections by their recent rates. The connections that finished
        last in a reduce get more of the link in the next one, which then takes longer. New
        connections get equal shares.
        """
        is_uneven = (
            self._transport.is_uneven and len(self._members) > 2 and self._seconds > RENEW_SECONDS
        )
        return "" if is_uneven else self.epoch

    async def run(
        self,
        plan: Plan,
        pseudo_grads: Mapping[int, torch.Tensor],
        digest_after: DigestAfter | None = None,
    ) -> dict[int, Mean]:
        """Return the means of this rank's parts, like `Reducer.run`. Raises OuterError after
        dropping everything in flight.
        """
        limit = self._deadlines.limit("reduce")
        self.num_audited = 0
        self._no_votes = {plan.id: self._no_votes.get(plan.id, {})}
        work = asyncio.create_task(self._connect_and_reduce(plan, pseudo_grads, digest_after))
        no_vote = asyncio.create_task(self._wait_for_no_vote(plan))
        try:
            await asyncio.wait({work, no_vote}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            is_done = work.done()
        finally:
            no_vote.cancel()
            work.cancel()
            await asyncio.wait({work, no_vote})
        # The exception is read in every case, because asyncio logs exceptions that were never
        # retrieved.
        error = None if work.cancelled() else work.exception()
        if is_done and error is None:
            return work.result()
        await self._disconnect()
        if is_done and error is not None:
            raise error
        stalled_by = self._find_stalled_by()
        cause = self.find_no_vote(plan)
        if stalled_by is not None and cause is None:
            island, of_means = stalled_by
            raise StalledError(island, limit, of_means=of_means)
        raise (
            TransportError(cause)
            if cause
            else DeadlineError(f"the reduce took longer than {limit:.0f} s")
        )

    def dispute(self, plan: Plan) -> None:
        """Record that participants of the plan have found different means: audit all parts that
        they reduce next, if there are audits.
        """
        assert_on_loop()
        if self._auditor is not None:
            self._auditor.disputed |= set(plan.names)

    async def drop(self) -> None:
        """Disconnect. Every rank calls this after an attempt that did not commit, because some
        participants may have left.
        """
        self.reducer.release()
        if self.epoch:
            await self._disconnect()

    def record_no_vote(self, plan: str, island: str, cause: str) -> None:
        """End the attempt at this plan, now or when it starts, because of an island's no vote."""
        assert_on_loop()
        if plan in self._no_votes or len(self._no_votes) < MAX_PLANS:
            self._no_votes.setdefault(plan, {})[island] = cause
            self._no_vote_arrived.set()

    def find_no_vote(self, plan: Plan) -> str | None:
        """Return why the attempt must end if one of its participants has voted no or is lost,
        otherwise None.
        """
        causes = self._no_votes.get(plan.id, {})
        return next(
            (f"island {name!r}: {causes[name]}" for name in plan.names if name in causes), None
        )

    async def on_vote(self, source: Endpoint, body: bytes) -> bytes:
        """Answer the call `vote` on ranks other than the leader, which receive only no votes."""
        vote = await receive(Vote, body)
        if vote.digest is not None or vote.island != source.island:
            raise MessageError("only an island's own no is sent to this rank")
        self.record_no_vote(vote.plan, vote.island, vote.cause)
        return b"heard"

    async def _disconnect(self) -> None:
        self.epoch = ""
        self._members = ()
        await self._transport.disconnect()

    async def _connect_and_reduce(
        self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor], digest_after: DigestAfter | None
    ) -> dict[int, Mean]:
        """Reduce and audit. Connect first if members changed or an attempt failed, which all
        participants see in the plan.
        """
        members = tuple(p.incarnation for p in plan.participants)
        is_connected = (
            self.epoch
            and members == self._members
            and all(p.epoch == self.epoch for p in plan.participants)
        )
        if not is_connected:
            await self._transport.connect(plan.id, find_partners(plan, self.reducer.me))
            self.epoch = plan.id
            self._members = members
        started = loop_time()
        means = await self.reducer.run(plan, pseudo_grads, digest_after)
        self._seconds = loop_time() - started
        if self._auditor is not None:
            self.num_audited = await self._auditor.run(plan, means)
        return means

    def _find_stalled_by(self) -> tuple[str, bool] | None:
        """Return the island that alone delayed the last attempt on this rank, and whether only
        means of it were missing.
        """
        if (found := self.reducer.stalled_by) is not None:
            island, leg = found
            return island, leg is Leg.GATHER
        audits = None if self._auditor is None else self._auditor.stalled_by
        return None if audits is None else (audits, False)

    async def _wait_for_no_vote(self, plan: Plan) -> None:
        while self.find_no_vote(plan) is None:
            self._no_vote_arrived.clear()
            await self._no_vote_arrived.wait()


def find_partners(plan: Plan, me: Endpoint) -> dict[Endpoint, str]:
    """Return the addresses of this endpoint and of the endpoints with which it shares parts,
    directly or through others.

    Islands with equal meshes divide their parts in the same way, so each rank communicates with one
    rank of each island. All endpoints in the result compute the same result, because all have the
    same plan.
    """
    names = plan.names
    carriers = [unpack_carriers(each.carriers) for each in plan.participants]
    sharing = {frozenset(map(Endpoint, names, ranks)) for ranks in zip(*carriers, strict=True)}
    found = {me}
    before = 0
    while len(found) > before:
        before = len(found)
        found.update(*(endpoints for endpoints in sharing if not found.isdisjoint(endpoints)))
    return {endpoint: address for endpoint, address in plan.addresses.items() if endpoint in found}


def build_attempts(
    config: OuterConfig,
    codecs: CodecChoice,
    me: Endpoint,
    space: Space,
    network: Network,
    deadlines: Deadlines,
    hooks: Hooks,
) -> Attempts:
    """Build the reduce of one rank, with audits if the config selects them. The network's event
    loop must be running.
    """
    merge = config.merge
    transport = network.transport
    messenger = network.messenger
    if config.audit == 0:
        return Attempts(transport, Reducer(transport, codecs, space, me, hooks, merge), deadlines)
    commitments = Commitments(network.island_key, network.names)
    kept = KeptPayloads(commitments)
    kept.serve(messenger)
    reducer = Reducer(transport, codecs, space, me, hooks, merge, kept)
    auditor = Auditor(config.audit, me, commitments, reducer.payloads, merge, messenger, deadlines)
    return Attempts(transport, reducer, deadlines, auditor)
