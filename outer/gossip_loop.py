"""The outer loop of one island in a gossip run: no round of all islands, each averages with a few (NoLoCo, 2506.10911).

    launch   snapshot of the pseudo-gradient
    land     meet the partners of the round -> take their shares -> tell each other -> outer step with those that came

Of the same face as outer/sync.py, so that diloco/island.py runs either. Every island has global params of its own:
digests differ between islands. No partner is waited for longer than a round takes; with none an island goes on alone.
Every rank of the island makes the same calls in the same order.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from outer.agreement import Interruption
from outer.codecs.cast import Fp32Codec
from outer.coding import coding_of, uniform
from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.desk import Desk, Offer
from outer.donor import Donor
from outer.errors import OuterError, TransportError
from outer.exchange import Params
from outer.fragments import schedule_of
from outer.gossip import Share, group_of, optimizer_of, outer_gradient
from outer.island_state import IslandState, Snapshot
from outer.loop import LoopThread
from outer.membership.base import Member
from outer.network import Network
from outer.pace import Pace
from outer.partners import Met, Partners
from outer.presence import LEAVE_SECONDS, Identity
from outer.reduce import Mean
from outer.reports import CaughtUp, Landing, RoundReport, Settings
from outer.shares import ShareCoding, Shares, ShareTaker
from outer.state import PartState, Position
from outer.sync import DONOR_WAIT_SECONDS
from outer.taking import Taker
from outer.team import Team
from outer.traffic import TrafficMeter
from outer.transfer import Fetch
from outer.transfer import Share as Wanted

log = logging.getLogger(__name__)

WHOLE = 0
"""The fragment that a round sends: there is one."""


class GossipLoop:
    """One rank's side of the outer loop."""

    def __init__(
        self,
        config: OuterConfig,
        identity: Identity,
        params: Params,
        team: Team,
        network: Network,
        loop: LoopThread,
        settings: Settings | None = None,
    ) -> None:
        assert config.gossip is not None, "the run gossips"
        self._gossip = config.gossip
        config = config.model_copy(update={"optimizer": optimizer_of(config.gossip)})
        self._config, self._identity, self._settings = config, identity, settings or Settings()
        self._team, self._network, self._loop = team, network, loop
        self._hooks = self._settings.hooks
        self.schedule = schedule_of(config)
        self._held = IslandState(config, coding_of(config), params, team)
        self._deadlines = Deadlines(config.wait_seconds)
        coding, carried = ShareCoding(self._held.space, config), self._held.exchange.carried
        self._shares = ShareTaker(coding, carried, network, self._deadlines)
        self.pace = Pace(config, identity.island, self._deadlines)
        self._donor = Donor(self._held.mine, network.messenger, self._hooks)
        self._desk = Desk(network.messenger, self._held.exchange.carriers)
        addresses = team.gather((network.transport.address, network.messenger.address))
        self._partners = None
        if team.is_leader:
            self._partners = Partners(identity, addresses, self._desk, network, self._deadlines)
        self._taker = Taker(self._held, self._fetch, team, loop, self._donors)
        self._snapshot: Snapshot | None = None
        self._landed_at: float | None = None
        self._traffic = TrafficMeter(team, network.transport.traffic)

    @property
    def position(self) -> Position:
        """Where this island stands; tokens are as if every island in the run had trained on as many as this one."""
        return self._held.mine.position

    @property
    def digest(self) -> str:
        """Of this island's own global params and outer momentum."""
        return self._held.digest

    @property
    def round(self) -> int:
        """The round that inner steps are made for now."""
        return self.position.round + (self._snapshot is not None)

    @property
    def in_flight(self) -> int | None:
        """The round that is launched and has not landed, if there is one."""
        return None if self._snapshot is None else self._snapshot.round

    # -- an island's life -------------------------------------------------------------------------------------

    def begin(self) -> Position:
        """Enter the run: with the global params of some island if any has committed a round, else from the start."""
        since = 0
        if self._team.on_leader(self._has_donors):
            self._take_state()
            # This round it makes alone: the others may have found their groups for it already.
            since = self.position.round + 1
        elif self._settings.joins:
            raise OuterError("this island joins a run, and no island that has committed a round can be found in it")
        if self._partners is not None:
            self._loop.run(self._partners.announce(self.position, since))
            if self.position.round == 0:
                self._loop.run(self._partners.wait_for(self._config.start_islands))
        return self.position

    def inner_steps(self) -> int:
        """How many this island makes for `round`."""
        return self.schedule.steps(self.round)

    def interruption(self, steps_left: int) -> Interruption:
        """Nothing ends inner steps early here."""
        return ""

    def launch(self, tokens: int) -> None:
        """Take the island's progress since the last round, made on `tokens` tokens. `land` must follow."""
        assert self._snapshot is None, "one round is on its way at a time"
        pseudo_grads = self._held.pseudo_grads()
        norm = self._held.norm(pseudo_grads)
        self._snapshot = Snapshot(self.round, WHOLE, pseudo_grads, norm, tokens, tokens)
        self._hooks.reached("plan", self._snapshot.round)

    def land(self) -> Landing:
        """Average with the group of the round, those of it that come, and go on from the island's new global params.

        Raises CaughtUp when the others are rounds ahead; OuterError when the pseudo-gradient cannot be used.
        """
        assert self._snapshot is not None, "there is a round on its way"
        snapshot, self._snapshot = self._snapshot, None
        started = time.monotonic()
        try:
            report = self._round(snapshot)
        finally:
            self._donor.is_busy = False
        return Landing([report], time.monotonic() - started)

    def global_params(self) -> AbstractContextManager[None]:
        """Local params are this island's global params while it lasts."""
        return self._held.global_params()

    def finish(self) -> None:
        """The run is over for this island: stay until the others have the last round, too."""
        self._team.on_leader(lambda: self._loop.run(self._leader.linger(self.position.round)))
        self.leave()

    def leave(self, steps: int = 0) -> None:
        """Withdraw from the run."""
        if self._partners is not None:
            self._loop.run(self._partners.leave(), LEAVE_SECONDS)

    # -- a round ----------------------------------------------------------------------------------------------

    def _round(self, snapshot: Snapshot) -> RoundReport:
        started, number = time.monotonic(), snapshot.round
        names = self._team.on_leader(lambda: self._loop.run(self._leader.names(number)))
        me, seed = self._identity.island, self._settings.seed
        partners = [n for n in group_of(me, seed, number, names, self._gossip.group) if n != me]
        own = self._offer(snapshot, partners)
        met = self._team.on_leader(lambda: self._meet(partners, number))
        came = time.monotonic()
        if met.is_behind:
            self._catch_up("; ".join(met.lost.values()))
        self._hooks.reached("send", number)
        self._donor.is_busy = True
        shares, failed = self._loop.run(self._shares.take_all(met.routes, number))
        lost = self._judge(met, failed, number)
        shares = {name: taken for name, taken in shares.items() if name not in lost} | {me: own}
        self._hooks.reached("apply", number)
        self._step(snapshot, shares, Position(round=number + 1, tokens=self._tokens_after(snapshot, len(names))))
        self._hooks.reached("applied", number)
        self._held.merge(WHOLE, 0.0)
        if lost:
            log.warning("round %d: without %s", number, "; ".join(f"{n}: {why}" for n, why in lost.items()))
        sent, received = self._traffic.count()
        return RoundReport(
            round=number,
            attempt=0,
            participants=sorted(shares),
            is_committed=True,
            digest=self.digest,
            bytes_sent=sent,
            bytes_received=received,
            reduce_seconds=time.monotonic() - came,
            wait_seconds=came - started,
            pseudo_grad_norm=snapshot.norm,
            gated={},
            cause="; ".join(f"without {name}: {why}" for name, why in lost.items()),
            is_own=True,
        )

    def _offer(self, snapshot: Snapshot, partners: list[str]) -> Shares:
        """Lay this rank's parts out for the partners; its share as they decode it. Raises OuterError on every rank."""
        payloads, cause = {}, None
        try:
            for part, grad in snapshot.pseudo_grads.items():
                grad = self._hooks.pseudo_grad(snapshot.round, grad)
                payloads[part] = self._shares.coding.encode(part, Share(grad, self._held.mine.parts[part]))
        except OuterError as error:
            cause = str(error)
        if causes := [cause for cause in self._team.gather(cause) if cause is not None]:
            raise OuterError(causes[0])
        leaving = {part: self._hooks.payload(snapshot.round, payload) for part, payload in payloads.items()}
        self._loop.run(self._desk.open(Offer(snapshot.round, frozenset(partners), leaving)))
        return {part: self._shares.coding.decode(part, payload) for part, payload in payloads.items()}

    def _meet(self, partners: list[str], round_number: int) -> Met:
        """On the leader: who is there."""
        return self._loop.run(self._leader.meet(partners, round_number, len(self._held.space.parts)))

    def _judge(self, met: Met, failed: Mapping[str, str], round_number: int) -> dict[str, str]:
        """By partner that does not count in the round: why. The same on every rank; nothing is given away after it."""
        lost = dict(met.lost)
        for causes in self._team.gather(dict(failed)):
            lost |= causes
        self._hooks.reached("vote", round_number)
        has_all = {name: name not in lost for name in [*met.routes, *met.lost]}
        told = self._team.on_leader(lambda: self._loop.run(self._leader.agree(has_all, round_number)))
        self._loop.run(self._desk.close(round_number + 1))
        return told | lost

    def _step(self, snapshot: Snapshot, shares: Mapping[str, Shares], position: Position) -> None:
        """One outer step with these islands' shares, and the word of it."""
        own, means = shares[self._identity.island], {}
        for part in snapshot.pseudo_grads:
            gradient = outer_gradient([shares[name][part] for name in sorted(shares)], own[part], self._gossip)
            # Kept for joiners, who follow this island alone.
            means[part] = Mean(gradient, gradient.view(torch.uint8), b"")
        self._held.commit(means, position)
        now = time.monotonic()
        if self._landed_at is not None:
            self._deadlines.observe("round", now - self._landed_at)
        self._landed_at = now
        self._stand()

    def _tokens_after(self, snapshot: Snapshot, num_islands: int) -> int:
        return self.position.tokens + snapshot.tokens * num_islands

    # -- another island's state -----------------------------------------------------------------------------

    def _has_donors(self) -> bool:
        """Whether any island has committed a round; waited for when this one must not begin a run."""
        deadline = time.monotonic() + (DONOR_WAIT_SECONDS if self._settings.joins else 0.0)
        while not (found := self._donors()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return bool(found)

    def _catch_up(self, cause: str) -> None:
        """Go on from an island that is ahead. Raises CaughtUp; returns when none can be taken from, to go on alone."""
        try:
            self._take_state()
        except TransportError as error:
            log.warning("behind the others, and no state can be taken from them: %s", error)
            return
        self._landed_at = None
        raise CaughtUp(f"the others have gone on: {cause}", is_kept=False)

    def _take_state(self) -> None:
        """Global params of another island, without its momentum, in the place of this one's. Raises TransportError."""
        self._taker.take()
        taken = self._held.mine.parts
        parts = {i: PartState(p, torch.zeros_like(p), self.position.round) for i, p in taken.items()}
        self._held.replace(parts, self.position)
        self._loop.run(self._desk.close(self.position.round))
        self._stand()

    def _donors(self) -> list[Member]:
        return self._loop.run(self._leader.donors(self.position.round))

    def _fetch(self) -> Fetch:
        held = self._held
        wanted = Wanted(held.space, held.exchange.carried, uniform(Fp32Codec()), self._config.optimizer)
        return Fetch(self._network.messenger, [], wanted, hooks=self._hooks)

    def _stand(self) -> None:
        """Say which round this island holds, and be a donor of it."""
        if self._partners is not None:
            self._donor.describe(self.digest, self._held.exchange.carriers, self._held.space.fingerprint)
            self._loop.run(self._partners.stand(self.position, self.pace.step_seconds))

    @property
    def _leader(self) -> Partners:
        assert self._partners is not None, "only the leader speaks for the island"
        return self._partners
