"""Averaging by gossip (NoLoCo, 2506.10911): in each round an island averages with a few partners.

    publish our share -> find the partners that are present -> fetch theirs -> confirm each pair ->
    outer step

Every island has global params of its own, so digests differ between islands. A partner is waited
for at most as long as a round takes; without any partner, an island continues alone.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from outer.agreement.proofs.certificate import Proof
from outer.agreement.running.peers import Identity
from outer.codecs.cast import Fp32Codec
from outer.codecs.choice import build_uniform_choice
from outer.config import GossipConfig, OuterConfig
from outer.connect.settings import Network
from outer.errors import InputError, OuterError
from outer.gossip.exchange import GossipExchange
from outer.gossip.partners import Partners
from outer.gossip.server import GossipServer, PublishedShare
from outer.gossip.shares import ShareCoding, ShareDownload, Shares
from outer.gossip.step import group_of, mean_values, outer_gradient
from outer.hooks import Hooks
from outer.membership.base import Member
from outer.network.event_loop import EventLoop
from outer.reduce.payloads import Mean
from outer.report import CaughtUp, LoopSettings, RoundReport
from outer.rounds.agreed import DONOR_WAIT_SECONDS, NOBODY_TO_JOIN, RESUME_SECONDS
from outer.rounds.averager import TakenState
from outer.rounds.checkpoint import NoMemory
from outer.rounds.leader import LEAVE_SECONDS, wait_for_donors
from outer.rounds.pace import Pace
from outer.rounds.traffic_meter import TrafficMeter
from outer.state.part_state import PartState, Position
from outer.state.pseudo_gradient import Contribution, Snapshot
from outer.state.replica import Replica
from outer.transfer.catch_up import CatchUp, NothingTaken
from outer.transfer.donor import Donor
from outer.transfer.donor_choice import DonorChoice
from outer.transfer.download import Download
from outer.transfer.download_plan import DownloadPlan

log = logging.getLogger(__name__)


@dataclass
class GossipAverager:
    """Implements `outer.rounds.averager.Averager`. Every rank of the island builds it and makes the
    same calls.
    """

    config: GossipConfig
    island: str
    start_islands: int
    settings: LoopSettings
    replica: Replica
    exchange: GossipExchange
    partners: Partners | None
    """The other islands as the leader reaches them; only on rank 0."""
    find_donors: Callable[[], list[Member]]
    """Function that returns islands that are ahead. Leader only."""
    catch_up: CatchUp
    donor: Donor
    pace: Pace
    event_loop: EventLoop
    traffic: TrafficMeter
    share: float = 1.0
    """Not used in a gossip run; checkpoints contain it."""
    proof: Proof = field(default_factory=Proof)
    """Always empty: gossip has no commits of all islands."""
    memory: NoMemory = field(default_factory=NoMemory)

    def __post_init__(self) -> None:
        self._landed_at: float | None = None

    @property
    def hooks(self) -> Hooks:
        return self.settings.hooks

    def resume(self, proof: Proof) -> None:
        """Do nothing: partners learn this island's round when it enters."""

    def enter(self) -> bool:
        """Enter with the params of an island that has committed a round, otherwise from the start
        or a checkpoint.
        """
        since = 0
        is_behind = self.replica.ranks.on_leader(self._wait_for_donors)
        if has_taken := is_behind and self.take_state() is not None:
            # This island makes the current round alone: the others may have found their partners
            # for it.
            since = self.replica.position.round + 1
        elif self.settings.joins and self.replica.position.round == 0:
            raise InputError(NOBODY_TO_JOIN)
        if self.partners is not None:
            self.event_loop.run(self.partners.announce(self.replica.position, since))
        if not has_taken:
            self._start()
        return has_taken

    def run(self, contribution: Contribution) -> list[RoundReport]:
        """Average with the round's present partners, take an outer step, and return its report.

        Raises CaughtUp when the others were rounds ahead and their state has been taken; OuterError
        when the pseudo-gradient cannot be used.
        """
        snapshot = contribution.wait(self.replica.position.round, 0.0)
        self.hooks.reached("plan", snapshot.round)
        try:
            return [self._run(snapshot)]
        finally:
            self.donor.is_busy = False

    def take_state(self) -> TakenState | None:
        """Replace the replica with the global params of another island, without its momentum."""
        if isinstance(self.catch_up.run(), NothingTaken):
            return None
        position = Position(round=self.replica.position.round, tokens=self.replica.position.tokens)
        taken = self.replica.carried.parts
        parts = {i: PartState(p, torch.zeros_like(p), position.round) for i, p in taken.items()}
        self.replica.replace(parts, position)
        self.exchange.close(position.round)
        self.announce()
        return TakenState(base_digest=None, contains_own=False)

    def announce(self) -> None:
        """Publish this island's round, and become a donor of its state."""
        if self.partners is not None:
            replica = self.replica
            self.donor.describe(
                replica.digest, replica.redistribution.carriers, replica.space.fingerprint
            )
            self.event_loop.run(
                self.partners.update_status(replica.position, self.pace.step_seconds)
            )

    def interruption(self, seconds_left: float) -> Literal[""]:
        """Return "": in a gossip run nothing ends inner steps early."""
        return ""

    def linger(self) -> bool:
        """Wait until other islands have committed as many rounds. Return False: no other history
        can survive.
        """
        self.event_loop.run(self._leader.linger(self.replica.position.round))
        return False

    def leave(self, steps: int) -> None:
        """Withdraw from the membership."""
        if self.partners is not None:
            self.event_loop.try_to(self.partners.leave(), LEAVE_SECONDS)

    # -- a round -----------------------------------------------------------------------------------

    def _run(self, snapshot: Snapshot) -> RoundReport:
        started = self.event_loop.time()
        number = snapshot.round
        replica = self.replica
        names = self._find_names(number)
        group = group_of(self.island, self.settings.seed, number, names, self.config.group)
        partners = [name for name in group if name != self.island]
        own = self._publish(snapshot, partners)
        met = self.exchange.meet(partners, number, len(replica.space.parts))
        came = self.event_loop.time()
        if met.is_behind:
            self._catch_up("; ".join(met.lost.values()))
        self.donor.is_busy = True
        self.hooks.reached("send", number)
        fetched, causes = self.exchange.fetch(met, number)
        self.hooks.reached("vote", number)
        shares, lost = self.exchange.confirm(met, fetched, causes, number)
        shares[self.island] = own
        self.hooks.reached("apply", number)
        tokens = replica.position.tokens + snapshot.tokens * len(names)
        self._step(snapshot, shares, Position(round=number + 1, tokens=tokens))
        if lost:
            log.warning(
                "round %d: without %s", number, "; ".join(f"{n}: {why}" for n, why in lost.items())
            )
        sent, received = self.traffic.count()
        return RoundReport(
            round=number,
            attempt=0,
            participants=sorted(shares),
            is_committed=True,
            digest=replica.digest,
            base="",
            units=snapshot.units,
            bytes_sent=sent,
            bytes_received=received,
            reduce_seconds=self.event_loop.time() - came,
            wait_seconds=came - started,
            pseudo_grad_norm=replica.norm(snapshot.pseudo_grads),
            gated={},
            cause="; ".join(f"without {name}: {why}" for name, why in lost.items()),
            is_own=True,
        )

    def _publish(self, snapshot: Snapshot, partners: list[str]) -> Shares:
        """Let the partners fetch this rank's parts. Return its own share as they will decode it.
        Raises OuterError.
        """
        number = snapshot.round
        hooks = self.hooks
        grads = {
            part: hooks.pseudo_grad(number, grad) for part, grad in snapshot.pseudo_grads.items()
        }
        payloads = self.exchange.encode(grads, self.replica.carried.parts)
        leaving = {part: hooks.payload(number, payload) for part, payload in payloads.items()}
        self.exchange.publish(PublishedShare(number, frozenset(partners), leaving))
        return self.exchange.decode(payloads)

    def _find_names(self, round_number: int) -> list[str]:
        ranks = self.replica.ranks.background
        return ranks.on_leader(lambda: self.event_loop.run(self._leader.names(round_number)))

    def _step(self, snapshot: Snapshot, shares: Mapping[str, Shares], position: Position) -> None:
        """Make one outer step with these islands' shares."""
        own = shares[self.island]
        means = {}
        for part in snapshot.pseudo_grads:
            given = [shares[name][part] for name in sorted(shares)]
            is_replaced = self.replica.space.parts[part].is_replaced
            mean = (
                mean_values(given) if is_replaced else outer_gradient(given, own[part], self.config)
            )
            # Kept for joiners, which follow this island alone.
            means[part] = Mean(mean, mean.view(torch.uint8))
        self.replica.commit(means, position, 1, observes=False)
        now = self.event_loop.time()
        if self._landed_at is not None:
            self.pace.deadlines.observe("round", now - self._landed_at)
        self._landed_at = now
        self.announce()

    # -- the beginning, and another island's state -------------------------------------------------

    def _start(self) -> None:
        """Start from the run's beginning or a checkpoint, together with the other islands that do
        so.
        """
        number = self.replica.position.round
        self.exchange.close(number)
        self.announce()
        if self.partners is not None:
            seconds = RESUME_SECONDS if number else self.pace.deadlines.initial_seconds
            wanted = self.start_islands
            came = self.event_loop.run(self.partners.wait_for(wanted, seconds))
            if came < wanted and number == 0:
                raise OuterError(
                    f"round 0: {came} of {wanted} islands (outer.start_islands) came in "
                    f"{seconds:.0f} s"
                )

    def _wait_for_donors(self) -> bool:
        return wait_for_donors(
            self.find_donors, self.event_loop, DONOR_WAIT_SECONDS if self.settings.joins else 0.0
        )

    def _catch_up(self, cause: str) -> None:
        """Take the state of an island that is ahead and raise CaughtUp; return, to continue alone,
        if that fails.

        The training thread is waiting in `land` at that time, so local params may be replaced from
        this thread.
        """
        if self.take_state() is None:
            log.warning(
                "this island is behind the others, but cannot take a state from them: %s", cause
            )
            return
        self._landed_at = None
        raise CaughtUp(f"the others have continued without this island: {cause}", is_kept=False)

    @property
    def _leader(self) -> Partners:
        assert self.partners is not None, "only the leader sends messages for the island"
        return self.partners


def build_gossip_averager(
    config: OuterConfig,
    identity: Identity,
    replica: Replica,
    network: Network,
    event_loop: EventLoop,
    pace: Pace,
    settings: LoopSettings,
) -> GossipAverager:
    """Build the averager of one rank. Every rank of the island calls it together."""
    assert config.gossip is not None, "the config asks for gossip"
    ranks = replica.ranks
    donor = Donor(replica.carried, network.messenger, partial(settings.hooks.reached, "donate"))
    server = GossipServer(network.messenger, replica.redistribution.carriers)
    addresses = ranks.gather((network.transport.address, network.messenger.address))
    partners = (
        Partners(identity, addresses, server, network, pace.deadlines) if ranks.is_leader else None
    )
    carried = replica.redistribution.own_parts
    shared = [index for index in carried if replica.space.parts[index].is_committed]
    coding = ShareCoding(replica.space, replica.codecs, config.gossip.params)
    download = ShareDownload(coding, shared, network, pace.deadlines)
    exchange = GossipExchange(download, server, partners, ranks.background, event_loop)

    def find_donors() -> list[Member]:
        assert partners is not None, "only the leader looks for donors"
        return event_loop.run(partners.find_donors(replica.position.round))

    def build_download() -> Download:
        wanted = DownloadPlan(
            replica.space, carried, build_uniform_choice(Fp32Codec()), config.optimizer
        )
        return Download(
            network.messenger, wanted, on_first_part=partial(settings.hooks.reached, "fetch")
        )

    return GossipAverager(
        config=config.gossip,
        island=identity.island,
        start_islands=config.start_islands,
        settings=settings,
        replica=replica,
        exchange=exchange,
        partners=partners,
        find_donors=find_donors,
        catch_up=CatchUp(
            replica,
            build_download,
            event_loop,
            lambda: DonorChoice(find_donors, event_loop.time, spread=identity.incarnation),
            lambda position: position.round > replica.position.round,
        ),
        donor=donor,
        pace=pace,
        event_loop=event_loop,
        traffic=TrafficMeter(ranks.background, network.transport.traffic),
    )
