"""A round as one rank goes through it, from a snapshot of its pseudo-gradient to the commit of the global params.

    plan -> reduce -> vote -> commit: outer step on the global params
     ^________________|  abort: nothing changed, next attempt

Local params are not touched, so it may run in a thread of its own while they are trained: it speaks to the island's
other ranks by the team's background group.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from outer.account import refused, settle
from outer.agreement import Agreement
from outer.attempt import Attempts
from outer.coding import Coding
from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.donor import Donor
from outer.errors import BehindError, OuterError, PoisonError, TransportError
from outer.island_state import IslandState, Snapshot
from outer.loop import LoopThread
from outer.merges.base import weights_of
from outer.network import Network
from outer.offer import Offer
from outer.pace import Pace
from outer.payloads import Mean
from outer.phases import Hooks
from outer.presence import Identity, Presence, standing_of
from outer.protocol import Protocol
from outer.reduce import Reducer
from outer.reports import RoundReport, Settings
from outer.rounds import Plan, Ready, no, parse, yes
from outer.state import Position
from outer.team import Team
from outer.traffic import TrafficMeter
from outer.transports.base import Endpoint
from outer.unsent import Unsent
from outer.verdicts import rules_of

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 100
"""Aborted attempts at one round before the island gives up."""


@dataclass(frozen=True)
class Side:
    """What the outer loop of one rank works with."""

    config: OuterConfig
    identity: Identity
    held: IslandState
    unsent: Unsent
    coding: Coding
    team: Team
    network: Network
    loop: LoopThread
    hooks: Hooks
    deadlines: Deadlines
    pace: Pace


def presence_of(side: Side, addresses: Sequence[tuple[str, str]], settings: Settings) -> Presence:
    """What the leader shows of the island; `addresses` are (transport, control) of each rank."""
    config, identity, membership = side.config, side.identity, side.network.membership
    assert membership is not None, "the leader has a membership"
    rules = rules_of(config, len(side.held.space.parts), settings.max_tokens)
    rules = replace(rules, refused=partial(refused_by, side, settings.index))
    protocol = Protocol(identity.island, rules, standing_of(side.held, is_coming=False))
    agreement = Agreement(protocol, side.network.messenger, membership, side.deadlines, identity.config_hash)
    return Presence(identity, addresses, side.held, agreement, membership, side.loop)


def refused_by(side: Side, index: int, readies: Sequence[Ready]) -> Mapping[str, str]:
    """`account.refused` of islands that hold this island's state. Raises OuterError for two with one island.index."""
    position = side.held.mine.position
    causes = refused(position.account, readies, side.held.terms)
    cause = causes.get(side.identity.island)
    if cause is not None and position.round == 0 and index < side.config.start_islands:
        raise OuterError(f"island.index is {index}: {cause}; give each island its own index")
    return causes


class Averaging:
    """Every rank of the island builds it and makes the same calls; the leader sets `presence`."""

    def __init__(self, side: Side, donor: Donor) -> None:
        self._side, self._donor, self._team = side, donor, side.team.background
        me = Endpoint(side.identity.island, side.team.rank)
        self.reducer = Reducer(side.network.transport, side.coding, side.held.space, me, side.hooks, side.config.merge)
        self.attempts = Attempts(side.network.transport, self.reducer, side.deadlines)
        self.presence: Presence | None = None
        """The leader's."""
        self.share = 1 / side.config.start_islands
        """This island's weight in the last mean; before the first, what it will be among equals."""
        self._traffic = TrafficMeter(self._team, side.network.transport.traffic)

    def run(self, snapshot: Snapshot) -> list[RoundReport]:
        """Attempts until one commits everywhere: the reports of all. Raises as `attempt`, and after MAX_ATTEMPTS."""
        return self.attend(Offer(snapshot))

    def attend(self, offer: Offer) -> list[RoundReport]:
        """As `run`, with what is in the offer by the time that a plan is made; with nothing this island listens."""
        reports: list[RoundReport] = []
        while not reports or not reports[-1].is_committed:
            if len(reports) == MAX_ATTEMPTS:
                cause = reports[-1].cause
                raise OuterError(
                    f"round {reports[-1].round} was aborted {MAX_ATTEMPTS} times in a row, at last because: {cause}"
                )
            reports.append(self.attempt(offer))
        return reports

    def attempt(self, offer: Offer) -> RoundReport:
        """One attempt. Not committed means that nothing has changed, on any island: call it again at once.

        Raises BehindError when others have committed without this island; OuterError when its own pseudo-gradient
        cannot be used, or too few islands come.
        """
        started = time.monotonic()
        plan = self._plan(offer)
        planned = time.monotonic()
        snapshot = self._given(plan, offer)
        means, failure = self._reduce(plan, {} if snapshot is None else snapshot.pseudo_grads)
        digest, cause, fault = self._result(means, failure)
        reduced = time.monotonic()
        is_committed = self._team.on_leader(lambda: self._decide(plan, digest, cause, fault))
        if is_committed:
            self._side.deadlines.observe("reduce", reduced - planned)
            self._commit(plan, means, listens=snapshot is None)
        else:
            self._side.loop.run(self.attempts.drop())
        if fault == self._side.identity.island:
            raise OuterError(cause)
        sent, received = self._traffic.count()
        return RoundReport(
            round=plan.round,
            attempt=plan.attempt,
            participants=plan.names,
            is_committed=is_committed,
            digest=self._side.held.digest,
            base=plan.participants[0].digest,
            units=() if snapshot is None else snapshot.units,
            bytes_sent=sent,
            bytes_received=received,
            reduce_seconds=reduced - planned,
            wait_seconds=planned - started,
            pseudo_grad_norm=0.0 if snapshot is None else snapshot.norm,
            listeners=[p.island for p in plan.participants if p.listens],
            gated=dict(self.reducer.gated),
            cause="" if is_committed else cause or "a vote is missing or differs",
        )

    def stand(self, *, is_coming: bool, included: list[str] | None = None) -> None:
        """Tell the others where this island stands; with `included` also that it can give a new state."""
        if self.presence is not None:
            if included is not None:
                self.presence.offer(self._donor, included)
            self.presence.stand(is_coming=is_coming, step_seconds=self._side.pace.step_seconds)

    # -- step by step ----------------------------------------------------------------------------------------

    def _plan(self, offer: Offer) -> Plan:
        """The plan, on every rank."""
        self._side.hooks.reached("plan", self._side.held.mine.position.round)
        body, donors, cause = self._team.on_leader(lambda: self._plan_on_leader(offer))
        if body is not None:
            return parse(Plan, body)
        raise OuterError(cause) if donors is None else BehindError(donors, cause)

    def _plan_on_leader(self, offer: Offer) -> tuple[bytes | None, tuple[str, ...] | None, str]:
        """(plan, None, ""), or (None, who holds the state, why) when behind, or (None, None, why) without a plan."""
        try:
            plan = self._side.loop.run(self._agree(offer))
            return plan.model_dump_json().encode(), None, ""
        except BehindError as behind:
            return None, behind.donors, behind.cause
        except OuterError as error:
            return None, None, str(error)

    async def _agree(self, offer: Offer) -> Plan:
        # The ready is made on the event loop, as `offered` does: whichever is first, the offer is not missed.
        ready = self._ready(offer)
        told = partial(self._side.hooks.reached, "planning", ready.round)
        return await self._leader.agreement.plan(ready, told)

    async def offered(self, offer: Offer) -> None:
        """Something was put into the offer of the round on its way: tell the others. On the leader's event loop."""
        await self._leader.agreement.give(self._ready(offer))

    def _ready(self, offer: Offer) -> Ready:
        position = self._side.held.mine.position
        snapshot, first = offer.of(position.round), self._side.unsent.reading.first(position.account)
        return self._leader.ready(snapshot, first, self.attempts.epoch, self._side.pace.step_seconds)

    def _given(self, plan: Plan, offer: Offer) -> Snapshot | None:
        """What this rank gives by the plan, whatever has come into the offer since; None: it listens."""
        if self._side.identity.island not in [p.island for p in plan.givers]:
            return None
        return offer.wait(plan.round, self._side.deadlines.limit("reduce"))

    def _reduce(
        self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, Mean], OuterError | None]:
        """The mean of this rank's parts, or why there is none."""
        self._donor.is_busy = True
        try:
            return self._side.loop.run(self.attempts.run(plan, pseudo_grads)), None
        except OuterError as error:
            log.info("round %d attempt %d failed here: %s", plan.round, plan.attempt, error)
            return {}, error
        finally:
            self._donor.is_busy = False

    def _result(self, means: Mapping[int, Mean], failure: OuterError | None) -> tuple[str | None, str, str | None]:
        """What the island votes: the digest of all ranks' means, or None, the cause, and whose fault it is."""
        fault = None
        if isinstance(failure, PoisonError):
            fault = failure.peer
        elif failure is not None and not isinstance(failure, TransportError):
            fault = self._side.identity.island
        results = self._team.gather((None if failure is None else str(failure), fault))
        failed = [(cause, fault) for cause, fault in results if cause is not None]
        if failed:
            # Our own fault first, then a peer's: the other ranks have only heard of it.
            ours = self._side.identity.island
            cause, fault = min(failed, key=lambda f: (f[1] != ours, f[1] is None))
            if fault is not None and fault != ours:
                self._side.network.refusals.add(fault, "payload", cause)
            return None, cause, fault
        digests = {index: mean.digest for index, mean in means.items()}
        return self._side.held.combine(digests, self._team), "", None

    def _decide(self, plan: Plan, digest: str | None, cause: str, fault: str | None) -> bool:
        """Whether the attempt commits, on the leader."""
        self._side.hooks.reached("vote", plan.round)
        me, said = self._side.identity.island, partial(self._side.hooks.reached, "decide", plan.round)
        vote = yes(plan, me, digest) if digest is not None else no(plan, me, cause, fault if fault != me else None)
        return self._side.loop.run(self._leader.agreement.decide(vote, said))

    def _commit(self, plan: Plan, means: Mapping[int, Mean], *, listens: bool) -> None:
        self._side.hooks.reached("apply", plan.round)
        held, before = self._side.held, self._side.held.mine.position
        tokens = before.tokens + sum(p.tokens for p in plan.participants)
        account = settle(before.account, plan.participants, held.terms)
        position = Position(round=plan.round + 1, tokens=tokens, account=account)
        held.commit(means, position, len(plan.givers), listens=listens)
        self.reducer.commit(plan.round, means)
        shares = weights_of([p.weight for p in plan.participants])
        self.share = shares[plan.names.index(self._side.identity.island)]
        self._side.pace.observe_commit(plan)
        self.stand(is_coming=True, included=[p.incarnation for p in plan.givers])

    @property
    def _leader(self) -> Presence:
        assert self.presence is not None, "only the leader speaks for the island"
        return self.presence
