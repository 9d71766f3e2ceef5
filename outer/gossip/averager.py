"""The outer loop of one island in a gossip run: no round of all islands, each averages with a few (NoLoCo, 2506.10911).

    launch   snapshot of the pseudo-gradient
    land     meet the partners of the round -> take their shares -> tell each other -> outer step with those that came

Of the same face as outer/sync.py, so that diloco/island.py runs either. Every island has global params of its own:
digests differ between islands. No partner is waited for longer than a round takes; with none an island goes on alone.
Every rank of the island makes the same calls in the same order.
"""

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

import torch

from outer import saved
from outer.agreement import Interruption
from outer.codecs.cast import Fp32Codec
from outer.coding import coding_of, uniform
from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.desk import Desk
from outer.donor import Donor
from outer.entering import DONOR_WAIT_SECONDS, RESUME_SECONDS, come_in_time
from outer.errors import OuterError, TransportError
from outer.exchange import Params
from outer.fragments import schedule_of
from outer.gossip import group_of, optimizer_of, outer_gradient
from outer.island_state import IslandState, Snapshot
from outer.loop import LoopThread
from outer.membership.base import Member
from outer.network import Network
from outer.own_reading import OwnReading
from outer.pace import Pace
from outer.partners import Partners
from outer.payloads import Mean
from outer.presence import LEAVE_SECONDS, Identity
from outer.reports import CaughtUp, Landing, RoundReport, Settings
from outer.runs import count
from outer.shares import ShareCoding, Shares, ShareTaker
from outer.state import PartState, Position
from outer.taking import Taker
from outer.team import Team
from outer.trade import Trade
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
        self.reading = OwnReading(config, self._settings.index, joins=self._settings.joins)
        self._resumed_units = 0
        """Read by the progress that a checkpoint held."""
        self._deadlines = Deadlines(config.wait_seconds)
        coding, carried = ShareCoding(self._held.space, config), self._held.exchange.carried
        shares = ShareTaker(coding, carried, network, self._deadlines)
        self.pace = Pace(config, identity.island, self._deadlines)
        self._donor = Donor(self._held.mine, network.messenger, self._hooks)
        self._desk = Desk(network.messenger, self._held.exchange.carriers)
        addresses = team.gather((network.transport.address, network.messenger.address))
        self._partners = None
        if team.is_leader:
            self._partners = Partners(identity, addresses, self._desk, network, self._deadlines)
        self._trade = Trade(shares, self._desk, self._partners, team, loop, self._hooks)
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
        if is_behind := self._team.on_leader(self._has_donors):
            self._take_state()
            # This round it makes alone: the others may have found their groups for it already.
            since = self.position.round + 1
        elif self._settings.joins:
            raise OuterError("this island joins a run, and no island that has committed a round can be found in it")
        if self._partners is not None:
            self._loop.run(self._partners.announce(self.position, since))
        if not is_behind:
            self._start()
            self.reading.take_up(self._resumed_units)
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
        self._snapshot = Snapshot(self.round, WHOLE, pseudo_grads, norm, tokens, tokens, self.reading.read)
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
            self._loop.try_to(self._partners.leave(), LEAVE_SECONDS)

    def moment_steps(self, landed: int | None = None) -> dict[str, int]:
        """Moments are not averaged."""
        return {}

    def saved(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What a checkpoint holds: this rank's tensors as they are, and facts. No round may be on its way."""
        assert self._snapshot is None, "what a round on its way will commit is not known yet"
        facts = saved.facts_of(self._held, saved.NoMemory(), weights=[0], share=1.0, units=count(self.reading.read))
        return saved.tensors_of(self._held, saved.NoMemory()), facts

    def room(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Zeros to load what this rank needs of the saved tensors into, for `restore`."""
        return saved.room_for(self._held, saved.NoMemory(), names)

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: object) -> None:
        """Go on from what was saved, before `begin`; local params have been loaded. Raises InputError."""
        read = saved.read_facts(facts)
        saved.restore(self._held, saved.NoMemory(), read, tensors)
        self._resumed_units = read.units

    # -- a round ----------------------------------------------------------------------------------------------

    def _round(self, snapshot: Snapshot) -> RoundReport:
        started, number = time.monotonic(), snapshot.round
        names = self._team.on_leader(lambda: self._loop.run(self._leader.names(number)))
        me, seed = self._identity.island, self._settings.seed
        partners = [n for n in group_of(me, seed, number, names, self._gossip.group) if n != me]
        own = self._trade.offer(snapshot, self._held.mine.parts, partners)
        met = self._trade.meet(partners, number, len(self._held.space.parts))
        came = time.monotonic()
        if met.is_behind:
            self._catch_up("; ".join(met.lost.values()))
        self._donor.is_busy = True
        shares, lost = self._trade.take(met, number)
        shares[me] = own
        self._hooks.reached("apply", number)
        tokens = self.position.tokens + snapshot.tokens * len(names)
        self._step(snapshot, shares, Position(round=number + 1, tokens=tokens))
        self._hooks.reached("applied", number)
        self._held.merge(number, 0.0)
        if lost:
            log.warning("round %d: without %s", number, "; ".join(f"{n}: {why}" for n, why in lost.items()))
        sent, received = self._traffic.count()
        return RoundReport(
            round=number,
            attempt=0,
            participants=sorted(shares),
            is_committed=True,
            digest=self.digest,
            base="",
            units=snapshot.units,
            bytes_sent=sent,
            bytes_received=received,
            reduce_seconds=time.monotonic() - came,
            wait_seconds=came - started,
            pseudo_grad_norm=snapshot.norm,
            gated={},
            cause="; ".join(f"without {name}: {why}" for name, why in lost.items()),
            is_own=True,
        )

    def _step(self, snapshot: Snapshot, shares: Mapping[str, Shares], position: Position) -> None:
        """One outer step with these islands' shares, and the word of it."""
        own, means = shares[self._identity.island], {}
        for part in snapshot.pseudo_grads:
            gradient = outer_gradient([shares[name][part] for name in sorted(shares)], own[part], self._gossip)
            # Kept for joiners, who follow this island alone.
            means[part] = Mean(gradient, gradient.view(torch.uint8), b"")
        self._held.commit(means, position, 1, listens=False)
        self.reading.begin(self.schedule.begin(position.round))
        now = time.monotonic()
        if self._landed_at is not None:
            self._deadlines.observe("round", now - self._landed_at)
        self._landed_at = now
        self._stand()

    # -- the beginning, and another island's state ----------------------------------------------------------

    def _start(self) -> None:
        """From the run's beginning or from a checkpoint, with those that do so, too."""
        number = self.position.round
        self._loop.run(self._desk.close(number))
        self._stand()
        self.reading.begin(self.schedule.begin(number))
        if self._partners is not None:
            seconds = RESUME_SECONDS if number else self._deadlines.initial_seconds
            wanted = self._config.start_islands
            came = self._loop.run(self._partners.wait_for(wanted, seconds))
            if came < wanted and number == 0:
                raise OuterError(f"round 0: {came} of {wanted} islands (outer.start_islands) came in {seconds:.0f} s")

    def _has_donors(self) -> bool:
        """Whether any island has committed a round; waited for when this one must not begin a run."""
        return come_in_time(self._donors, DONOR_WAIT_SECONDS if self._settings.joins else 0.0)

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
        number, tokens = self.position.round, self.position.tokens
        parts = {i: PartState(p, torch.zeros_like(p), number) for i, p in taken.items()}
        self._held.replace(parts, Position(round=number, tokens=tokens))
        self.reading.begin(self.schedule.begin(number))
        self._loop.run(self._desk.close(number))
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
