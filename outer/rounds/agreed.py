"""Averaging by agreed rounds: all participants of a plan commit the same mean, or none commits."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Ready
from outer.agreement.proofs.certificate import Proof
from outer.agreement.proofs.claims import Claims
from outer.agreement.proofs.witnesses import Witnesses
from outer.agreement.rules import build_rules
from outer.agreement.running.driver import Interruption, ProtocolDriver
from outer.agreement.running.peers import Identity, Peers
from outer.agreement.state_machine import RoundProtocol
from outer.agreement.suspicions import ROTATE_AFTER
from outer.config import OuterConfig
from outer.connect.settings import Network
from outer.errors import InputError, OuterError
from outer.leases.cursor import LeaseCursor
from outer.leases.ledger import find_refusals
from outer.merges.bound import RecentLengths
from outer.network.endpoints import Endpoint
from outer.network.event_loop import EventLoop
from outer.network.retry import backoff
from outer.reduce.attempt import Attempts, build_attempts
from outer.reduce.reducer import Reducer
from outer.report import LoopSettings, RoundReport
from outer.rounds.averager import TakenState
from outer.rounds.island_reduce import IslandReduce
from outer.rounds.leader import Leader, build_status
from outer.rounds.pace import Pace
from outer.rounds.round import RoundRunner
from outer.rounds.traffic_meter import TrafficMeter
from outer.state.pseudo_gradient import Contribution
from outer.state.replica import Replica
from outer.transfer.cache import PartsCache
from outer.transfer.catch_up import CatchUp, CaughtUpState, NothingTaken, believe_all, is_ahead
from outer.transfer.donor import Donor
from outer.transfer.donor_choice import DonorChoice
from outer.transfer.download import Download
from outer.transfer.download_plan import DownloadPlan

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 100
"""Aborted attempts at one round after which two islands give up. Among more islands, some are
left out instead."""
FIRST_PAUSE_SECONDS = 0.05
MAX_PAUSE_SECONDS = 2.0
"""Pause before another attempt after several have failed. It doubles with each attempt, up to
MAX_PAUSE_SECONDS."""
RESUME_SECONDS = 60.0
"""How long an island that resumes from a checkpoint waits for all others to do so; then it
continues without them."""
DONOR_WAIT_SECONDS = 10.0
"""How long an island that must not begin a run waits for an island that can provide a state."""
NOBODY_TO_JOIN = (
    "this island joins a run, but finds no island that has committed a round and can "
    "provide its state"
)
FINISH_SECONDS = 60.0
"""How long an island that has the last round stays for live islands that do not have it yet."""


class AgreedAverager:
    """Implements `outer.rounds.averager.Averager`. Every rank of the island builds it and makes the
    same calls.
    """

    def __init__(
        self,
        runner: RoundRunner,
        catch_up: CatchUp,
        incarnation: str,
        start_islands: int,
        settings: LoopSettings,
    ) -> None:
        self.runner = runner
        self.hooks = runner.hooks
        self._catch_up = catch_up
        self._incarnation = incarnation
        self._start_islands = start_islands
        self._joins = settings.joins
        self._on_abort = settings.on_abort
        self._has_entered_late = False
        self._causes: list[str] = []
        """Reasons why the state of other islands could not be taken."""

    @property
    def event_loop(self) -> EventLoop:
        return self.runner.reduce.event_loop

    @property
    def memory(self) -> Reducer:
        """The residuals, last means and norms that the reducer keeps."""
        return self.runner.reduce.attempts.reducer

    @property
    def share(self) -> float:
        return self.runner.share

    @share.setter
    def share(self, value: float) -> None:
        self.runner.share = value

    @property
    def proof(self) -> Proof:
        return Proof() if self.runner.leader is None else self.runner.leader.proof

    def resume(self, proof: Proof) -> None:
        if self.runner.leader is not None:
            self.runner.leader.resume(proof)

    def enter(self) -> bool:
        """Enter the run: with the state of islands that have committed a round, otherwise from
        the start or a checkpoint.
        """
        runner = self.runner
        if runner.leader is not None:
            runner.leader.announce()
        has_taken = self._meet_again() if runner.replica.position.round > 0 else self._begin()
        runner.update_status(is_coming=True)
        return has_taken

    def run(self, contribution: Contribution) -> list[RoundReport]:
        """Make attempts until one commits everywhere, and return the reports of all. Raises like
        `RoundRunner.attempt`.

        Two islands, of which neither can be left out, and an island that is alone give up after
        MAX_ATTEMPTS.
        """
        reports: list[RoundReport] = []
        while not reports or not reports[-1].is_committed:
            # An island that no other can reach any more ends up alone, whichever islands took part
            # in the first attempts.
            names = {name for report in reports[-MAX_ATTEMPTS:] for name in report.participants}
            if len(reports) >= MAX_ATTEMPTS and len(names) <= 2:
                failed = (
                    f"round {reports[-1].round} of {' and '.join(sorted(names))} was aborted "
                    f"{len(reports)} times"
                )
                raise OuterError(f"{failed} in a row, the last time because: {reports[-1].cause}")
            if len(reports) >= ROTATE_AFTER and len(reports[-1].participants) > 1:
                num_failures = len(reports) - ROTATE_AFTER + 1
                self.event_loop.sleep(
                    backoff(
                        num_failures,
                        first_seconds=FIRST_PAUSE_SECONDS,
                        max_seconds=MAX_PAUSE_SECONDS,
                    )
                )
            reports.append(self.runner.attempt(contribution))
            if not reports[-1].is_committed:
                self._on_abort(reports[-1])
        self._has_entered_late = False
        return reports

    def take_state(self) -> TakenState | None:
        taken = self._take_state()
        if taken is None:
            return None
        return TakenState(
            taken.base_digest, contains_own=self._incarnation in taken.description.included
        )

    def announce(self) -> None:
        self.runner.update_status(is_coming=True)

    def interruption(self, seconds_left: float) -> Interruption:
        return self._leader.interruption(seconds_left, entered_late=self._has_entered_late)

    def linger(self) -> bool:
        """Wait like `Averager.linger`, at most FINISH_SECONDS."""
        return self._leader.linger(FINISH_SECONDS)

    def leave(self, steps: int) -> None:
        if self.runner.leader is not None:
            self.runner.leader.leave(steps)

    def _begin(self) -> bool:
        """Enter without a checkpoint. Return whether this island has taken the state of others."""
        # Islands that are ahead may die before they have provided their state, so a joiner looks
        # for others.
        while self.runner.replica.ranks.on_leader(self._finds_donors):
            if self._take_state() is not None:
                return True
            if not self._joins:
                return False
        if self._joins:
            raise InputError("; ".join([NOBODY_TO_JOIN, *self._causes]))
        return False

    def _finds_donors(self) -> bool:
        """Return whether an island can provide a state. A joiner waits while others begin the
        run. Leader only.
        """
        if not self._joins:
            return self._leader.wait_for_donors(0.0, 1 << 62)
        return self._leader.wait_to_join(
            DONOR_WAIT_SECONDS, self.runner.pace.deadlines.initial_seconds
        )

    def _meet_again(self) -> bool:
        """Enter from a checkpoint: wait for the others and take the surviving state. Return whether
        a state was taken.

        All islands may be resuming from checkpoints, and the island with the newest state may be
        the last to join. An island that trained before that would begin a history that is
        discarded, so it waits for all. It does not wait if it takes a state that was committed
        after the others started, because the run is already going on.
        """
        deadline = self.event_loop.time() + RESUME_SECONDS
        has_taken = False
        is_going_on = False
        while not is_going_on and self.runner.replica.ranks.on_leader(
            partial(self._is_behind, deadline)
        ):
            if (taken := self._take_state()) is not None:
                is_going_on = bool(taken.description.included)
                has_taken = True
            self.announce()
        if self._joins and self.runner.replica.ranks.on_leader(lambda: self._leader.is_alone):
            raise OuterError(NOBODY_TO_JOIN)
        return has_taken

    def _is_behind(self, deadline: float) -> bool:
        """Return whether an island with a better state joins before the deadline; stop early if
        all are here. Leader only.
        """
        seconds = deadline - self.event_loop.time()
        return seconds > 0 and self._leader.wait_for_donors(seconds, self._start_islands)

    def _take_state(self) -> CaughtUpState | None:
        """Take the state of others, and return it. Islands wait for this one if it lacks only
        means. None if no island provides a state.
        """
        taken = self._catch_up.run()
        if isinstance(taken, NothingTaken):
            self._causes += taken.causes
            return None
        self._has_entered_late = True
        self.runner.pace.interrupt()
        self.runner.update_status(is_coming=True, included=taken.description.included)
        return taken

    @property
    def _leader(self) -> Leader:
        assert self.runner.leader is not None, "only the leader sends messages for the island"
        return self.runner.leader


def build_agreed_averager(
    config: OuterConfig,
    identity: Identity,
    replica: Replica,
    network: Network,
    event_loop: EventLoop,
    pace: Pace,
    cursor: LeaseCursor,
    settings: LoopSettings,
) -> AgreedAverager:
    """Build the averager of one rank. Every rank of the island calls it together."""
    ranks = replica.ranks
    hooks = settings.hooks
    me = Endpoint(identity.island, ranks.rank)
    donor = Donor(replica.carried, network.messenger, partial(hooks.reached, "donate"))
    attempts = build_attempts(
        config, replica.codecs, me, replica.space, network, pace.deadlines, hooks
    )
    addresses = ranks.gather((network.transport.address, network.messenger.address))
    recent = RecentLengths(config.merge.refuse_norm_ratio, me.island)
    leader = None
    if ranks.is_leader:
        assert network.membership is not None, "the leader has a membership"
        own = identity.config_hash, identity.text
        peers = Peers(me.island, network.messenger, network.membership, pace.deadlines, *own)
        driver = _build_driver(config, me.island, replica, settings, network, peers, attempts)
        leader = Leader(
            identity,
            addresses,
            replica,
            driver,
            network.membership,
            event_loop,
            donor,
            settings.link_kbit,
        )
        leader.loss_scale = settings.loss_scale
    else:
        network.messenger.serve("vote", attempts.on_vote)
    runner = RoundRunner(
        island=identity.island,
        replica=replica,
        cursor=cursor,
        pace=pace,
        reduce=IslandReduce(
            identity.island, replica, attempts, event_loop, network.rejections, donor, recent
        ),
        leader=leader,
        names=network.names,
        hooks=hooks,
        traffic=TrafficMeter(ranks.background, network.transport.traffic),
        share=1 / config.start_islands,
    )

    build_download = partial(
        _build_download, config, identity.config_hash, replica, network, settings
    )

    def build_choice() -> DonorChoice:
        assert leader is not None, "only the leader chooses donors"
        return DonorChoice(
            leader.find_donors,
            event_loop.time,
            leader.disbelieve,
            leader.believe,
            identity.incarnation,
        )

    def tell(is_coming: bool) -> None:
        runner.update_status(is_coming=is_coming)

    check = believe_all if leader is None else leader.check
    catch_up = CatchUp(
        replica, build_download, event_loop, build_choice, partial(is_ahead, replica), check, tell
    )
    return AgreedAverager(runner, catch_up, identity.incarnation, config.start_islands, settings)


def _build_download(
    config: OuterConfig,
    config_hash: str,
    replica: Replica,
    network: Network,
    settings: LoopSettings,
) -> Download:
    """Build a download of the parts that this rank carries. Parts that have arrived are kept in
    `settings.cache_dir`.
    """
    space = replica.space
    cache = None
    if settings.cache_dir is not None:
        folder = settings.cache_dir / f"rank-{replica.ranks.rank}"
        cache = PartsCache(folder, space.fingerprint, config_hash)
    parts = replica.redistribution.own_parts
    wanted = DownloadPlan(space, parts, replica.codecs, config.optimizer, config.start_islands)
    fetch = partial(settings.hooks.reached, "fetch")
    return Download(network.messenger, wanted, cache, fetch, settings.on_download)


def _build_driver(
    config: OuterConfig,
    island: str,
    replica: Replica,
    settings: LoopSettings,
    network: Network,
    peers: Peers,
    attempts: Attempts,
) -> ProtocolDriver:
    rules = build_rules(config, len(replica.space.parts), settings.max_tokens, replica.claims)
    refusals = partial(_find_refusals, replica, island, settings.index, config.start_islands)
    rules = replace(rules, find_refusals=refusals)
    start = build_status(replica, is_coming=False)
    claims = Claims(Witnesses(network.signer))
    protocol = RoundProtocol(Knowledge(island, rules, start, claims))
    on_no = attempts.record_no_vote
    tell = {"on_wait": settings.on_wait, "on_lost": settings.on_lost}
    return ProtocolDriver(protocol, peers, on_no=on_no, **tell, rejections=network.rejections)


def _find_refusals(
    replica: Replica, island: str, index: int, start_islands: int, readies: Sequence[Ready]
) -> Mapping[str, str]:
    """Apply `ledger.find_refusals` for islands that hold this island's state. Raises OuterError
    if two share an index.
    """
    position = replica.position
    causes = find_refusals(position.ledger, readies, replica.terms)
    cause = causes.get(island)
    if cause is not None and position.round == 0 and index < start_islands:
        raise OuterError(f"island.index is {index}: {cause}; give each island its own index")
    return causes
