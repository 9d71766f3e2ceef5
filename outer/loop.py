"""The outer loop of one island: enter the run, then make a round after each group of inner steps.
Read this first.

    begin     enter the run, from the start or with the state of others
    launch    snapshot of a fragment's pseudo-gradient; its round runs in the background
              (rounds/background.py)
    land      wait for the commit; the fragment's local params continue from the global params
    finish    the run is over: stay until the others have the last round

An `Averager` decides how islands average: by agreed rounds (rounds/agreed.py) or by gossip
(gossip/averager.py). With `outer.wait_for: quorum` rounds continue while an island trains, and
rounds/quorum.py replaces launch and land.

Every rank of the island makes the same calls in the same order; rank 0, the leader, communicates
with other islands.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from outer.agreement.running.driver import Interruption
from outer.agreement.running.peers import Identity
from outer.config import OuterConfig
from outer.connect.settings import Network
from outer.errors import BehindError
from outer.gossip.averager import build_gossip_averager
from outer.gossip.step import build_optimizer_config
from outer.leases.cursor import Cursor, LeaseCursor
from outer.leases.ranges import count
from outer.leases.static_cursor import StaticCursor
from outer.leases.terms import Terms
from outer.network.deadlines import Deadlines
from outer.network.event_loop import EventLoop
from outer.report import CaughtUp, Landing, LoopSettings, RoundReport
from outer.rounds import checkpoint
from outer.rounds.agreed import AgreedAverager, build_agreed_averager
from outer.rounds.averager import Averager
from outer.rounds.background import BackgroundRound
from outer.rounds.pace import Pace
from outer.rounds.quorum import QuorumRounds
from outer.space.fragments import FragmentSchedule, build_schedule, count_moment_steps
from outer.space.ranks import RankGroup
from outer.space.redistribute import Params
from outer.state.earlier import EarlierState
from outer.state.part_state import Position
from outer.state.pending import PendingProgress
from outer.state.pseudo_gradient import Snapshot
from outer.state.replica import Replica

log = logging.getLogger(__name__)


class OuterLoop:
    """One rank's side of the outer loop."""

    def __init__(
        self,
        config: OuterConfig,
        replica: Replica,
        averager: Averager,
        schedule: FragmentSchedule,
        pace: Pace,
        pending: PendingProgress,
    ) -> None:
        self.config = config
        self.replica = replica
        self.averager = averager
        self.schedule = schedule
        self.pace = pace
        self.pending = pending
        self.worker = averager.event_loop.worker(f"{threading.current_thread().name} rounds")
        """The thread that makes this rank's rounds. It is created now, because later there may be
        no memory for a thread.
        """
        self.total_tokens: int | None = None
        """Tokens with whose commit a run is over whose rounds wait for a quorum only; None: it has
        no end.
        """
        self._in_flight: BackgroundRound | None = None
        self._ahead: dict[int, torch.Tensor] | None = None
        """Eager updates: the values from which the fragment in flight is trained, by carried part;
        None: local params.
        """
        self._resumed_units = 0
        """Number of units that the progress in a checkpoint had read."""

    @property
    def position(self) -> Position:
        """The run's position, as far as this island knows."""
        return self.replica.position

    def is_last(self, position: Position) -> bool:
        """Return whether the run is over at this position."""
        if self.config.wait_for == "all":
            return position.round >= self.config.num_rounds
        # Islands contribute at their own pace, so the number of rounds says nothing.
        return self.total_tokens is not None and position.tokens >= self.total_tokens

    @property
    def digest(self) -> str:
        """Digest of the committed state that this island holds."""
        return self.replica.digest

    @property
    def cursor(self) -> Cursor:
        """The cursor with the units of data that this rank reads."""
        return self.pending.cursor

    @property
    def round(self) -> int:
        """The round for which inner steps are made now: the one after the round in flight, if there
        is one.
        """
        return (
            self.position.round if self._in_flight is None else self._in_flight.snapshot.round + 1
        )

    @property
    def begins_stage(self) -> bool:
        """Whether `round` is the first round of a stage of the run. The data of the earlier stage
        are closed then.
        """
        return self.round in self.replica.terms.stage_rounds

    @property
    def in_flight(self) -> int | None:
        """The round that is launched and has not landed; None if there is none."""
        return None if self._in_flight is None else self._in_flight.snapshot.round

    # -- from the beginning to the end of a run ----------------------------------------------------

    def begin(self) -> Position:
        """Enter the run: with the state of islands that have committed a round, otherwise from the
        start together with others.
        """
        has_taken = self.averager.enter()
        if has_taken:
            self.pending.drop(self.position)
            return self.position
        self.cursor.begin(self.position.round, self.position.ledger)
        self.cursor.resume(self._resumed_units)
        return self.position

    def inner_steps(self) -> int:
        """Return the number of inner steps for `round`, which starts now: the schedule's, or fewer
        with dynamic local steps.
        """
        steps = self.schedule.steps(self.round)
        # The leader decides, because a round in flight may already have changed the pace on another
        # rank.
        return self.replica.ranks.on_leader(lambda: self.pace.begin(steps))

    def interruption(self, steps_left: int) -> Interruption:
        """Return why inner steps should end now, or "". The result is the same on every rank. Call
        it after each inner step.
        """
        return self.replica.ranks.on_leader(lambda: self._find_interruption(steps_left))

    def count_routed(self, layers: Sequence[int], counts: Sequence[Sequence[int]]) -> None:
        """Count the experts that the tokens of an inner step chose, see
        `PendingProgress.count_routed`. Call it before the step may launch a round, not for a
        skipped step.
        """
        self.pending.count_routed(layers, counts)

    def launch(self, tokens: int, earlier: EarlierState | None = None) -> None:
        """Start `round` with the island's progress since the last launch, made on `tokens` tokens.

        The round before must have landed, and `land` must be called before the next launch. With
        `earlier` this island votes to go back to that state, which the round does if more than half
        of the participants name it.
        """
        assert self._in_flight is None, "one round is in flight at a time"
        snapshot = self.pending.snapshot(self.round, tokens)
        if self.config.eager:
            self._ahead = self.replica.look_ahead(snapshot, self.averager.share)
        self._in_flight = BackgroundRound(self.averager, snapshot, self.worker, earlier)

    def land(self) -> Landing:
        """Wait for the round in flight, and continue from the state that it has committed.

        Raises CaughtUp when others have committed without this island; OuterError when its own
        pseudo-gradient cannot be used, too few islands join, or too many attempts have failed.
        """
        assert self._in_flight is not None, "there is a round in flight"
        snapshot = self._in_flight.snapshot
        reports = []
        waited = 0.0
        try:
            while not reports:
                reports, seconds = self._try_to_land(self._in_flight)
                waited += seconds
        finally:
            self._in_flight = None
        if reports[-1].earlier is None:
            self.merge(snapshot)
        else:
            self._take_earlier(snapshot)
        return Landing(reports, waited)

    def merge(self, snapshot: Snapshot) -> None:
        """Let local params of the snapshot's fragment continue from the global params, because the
        round is committed.
        """
        self.averager.hooks.reached("applied", snapshot.round)
        self.pending.settle(snapshot, self.position)
        if self._ahead is None:
            self.replica.merge(snapshot.round, self.config.mix)
        else:
            self.replica.correct(self._ahead, snapshot.round)
            self._ahead = None

    def catch_up(
        self, behind: BehindError, weight: int, sent: dict[int, torch.Tensor] | None = None
    ) -> CaughtUp | None:
        """Take the state that survives. The returned error contains whether this island's progress
        was put on top of it.

        None means that no reachable island has a newer state: this island's own survives, and
        nothing has changed. Otherwise progress is kept when exactly one commit was missed, that
        commit belongs to this island's own history and does not contain the progress, no other
        island has leased the data, and the run has a later round. Progress that was kept once and
        misses a commit again is dropped. `weight` is the progress in tokens, `sent` the
        pseudo-gradient in flight.
        """
        digest = self.digest
        progress = self.replica.pseudo_grads()
        for part, values in (self._ahead or {}).items():
            # Local params were trained from these values, which do not contain the pseudo-gradient
            # in flight.
            progress[part] += values - self.replica.carried.parts[part] + (sent or {})[part]
        if (taken := self.averager.take_state()) is None:
            log.warning(
                "no reachable island has a newer state: continuing from round %d",
                self.position.round,
            )
            self.averager.announce()
            return None
        self._ahead = None
        is_same_history = taken.base_digest == digest
        # Without a later round no island would average it, and the model would end with params of
        # its own.
        has_later_round = not self.is_last(self.position)
        may_keep = (
            self.config.missed_progress == "rebase" and is_same_history and not taken.contains_own
        )
        is_kept = may_keep and has_later_round and self.pending.keep(weight)
        if is_kept:
            self.replica.rebase(progress)
        else:
            self.pending.drop(self.position)
        if not is_same_history:
            self.averager.memory.forget()
        self.averager.announce()
        return CaughtUp(behind.cause, is_kept=is_kept)

    def rewind(self) -> None:
        """Drop the changes of inner steps to the local params since the last commit. No round may
        be in flight.
        """
        assert self._in_flight is None, (
            "a round in flight would be merged into params that do not contain it"
        )
        self.replica.take_over()

    def finish(self) -> None:
        """End the run: stay until the others have the last round, or take it from them if this
        island does not have it.
        """
        if (
            self.replica.ranks.on_leader(self.averager.linger)
            and self.averager.take_state() is None
        ):
            log.warning(
                "other islands end with another state than this one, and their state cannot be "
                "taken"
            )
        self.leave()

    def leave(self, steps: int = 0) -> None:
        """Send a goodbye, `steps` inner steps into the round. Wait for nothing else."""
        self.averager.leave(steps)

    # -- the state ---------------------------------------------------------------------------------

    def global_params(self) -> AbstractContextManager[None]:
        """Return a context in which local params hold the global params. No round may be in
        flight.
        """
        assert self._in_flight is None, "what a round in flight will commit is not known yet"
        return self.replica.global_params()

    def moment_steps(self, landed: int | None = None) -> dict[str, int]:
        """Return the run's inner steps in the averaged second moments that replaced the local ones,
        by parameter.

        `landed` is the round that has just landed; None stands for a state taken from others. 0
        means never averaged.
        """
        return count_moment_steps(self.replica.space, self.schedule, self.position.round, landed)

    def save(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return this rank's tensors for a checkpoint, not copied, and its facts. No round may be
        in flight.
        """
        assert self._in_flight is None, "what a round in flight will commit is not known yet"
        memory = self.averager.memory
        units = count(self.cursor.read)
        averager = self.averager
        pending = self.pending
        facts = checkpoint.build_facts(
            self.replica, memory, pending, averager.share, units, averager.proof
        )
        return checkpoint.collect_tensors(self.replica, memory), facts

    def allocate(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return zero tensors to load into, for the saved tensors that this rank needs. Pass them
        to `restore`.
        """
        return checkpoint.allocate(self.replica, self.averager.memory, names)

    def read_earlier(self, tensors: Mapping[str, torch.Tensor], facts: object) -> EarlierState:
        """Return the global state of a checkpoint, for `launch`. Nothing changes. Raises
        InputError.
        """
        return checkpoint.read_earlier(self.replica, checkpoint.parse_facts(facts), tensors)

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: object) -> None:
        """Resume from a checkpoint. Call it before `begin`, after loading local params. Raises
        InputError.
        """
        parsed = checkpoint.parse_facts(facts)
        checkpoint.restore(self.replica, self.averager.memory, parsed, tensors)
        checkpoint.restore_pending(self.pending, parsed)
        self.averager.share = parsed.share
        self._resumed_units = parsed.units
        self.averager.resume(parsed.proof)

    def _take_earlier(self, snapshot: Snapshot) -> None:
        """Let local params continue from the earlier state to which the round went back, without
        the progress.
        """
        self.averager.hooks.reached("applied", snapshot.round)
        self.pending.give_up(snapshot, self.position)
        self._ahead = None
        self.replica.take_over()

    def _try_to_land(self, in_flight: BackgroundRound) -> tuple[list[RoundReport], float]:
        """Return reports of the round's attempts and the seconds spent waiting; no reports if the
        round was started again.
        """
        snapshot = in_flight.snapshot
        try:
            return in_flight.land()
        except BehindError as behind:
            if (
                caught := self.catch_up(behind, snapshot.weight, snapshot.pseudo_grads)
            ) is not None:
                raise caught from None
            self._in_flight = BackgroundRound(
                self.averager, snapshot, self.worker, in_flight.earlier
            )
            return [], 0.0
        except CaughtUp:
            # The averager has taken another island's state already.
            self.pending.drop(self.position)
            raise

    def _find_interruption(self, steps_left: int) -> Interruption:
        if self.pace.seconds_left <= 0:
            return "time is up"
        if self._in_flight is not None:
            # Islands do not wait for this one, whose round is in flight, so stop only if that round
            # has failed.
            return "behind" if self._in_flight.has_failed else ""
        return self.averager.interruption(
            min(steps_left * self.pace.step_seconds, self.pace.seconds_left)
        )


def build_loop(
    config: OuterConfig,
    identity: Identity,
    params: Params,
    ranks: RankGroup,
    network: Network,
    event_loop: EventLoop,
    settings: LoopSettings | None = None,
) -> OuterLoop:
    """Build the outer loop of one rank, with the averager that the config selects. Every rank calls
    it together.
    """
    settings = settings or LoopSettings()
    pace = Pace(config, identity.island, Deadlines(config.wait_seconds), settings.now)
    schedule = build_schedule(config)
    if config.gossip is not None:
        config = config.model_copy(update={"optimizer": build_optimizer_config(config.gossip)})
        replica = Replica(config, params, ranks)
        cursor = StaticCursor(config, settings.index, joins=settings.joins)
        averager = build_gossip_averager(
            config, identity, replica, network, event_loop, pace, settings
        )
    else:
        terms = Terms(
            inner_steps=config.inner_steps,
            stage_rounds=settings.stage_rounds,
            stage_tokens=settings.stage_tokens,
            counted=settings.owners,
        )
        replica = Replica(config, params, ranks, terms, settings.experts_per_token)
        cursor = LeaseCursor(identity.island, settings.index, identity.incarnation, replica.terms)
        averager = build_agreed_averager(
            config, identity, replica, network, event_loop, pace, cursor, settings
        )
    pending = PendingProgress(replica, cursor, config.fragments, settings.max_tokens)
    return OuterLoop(config, replica, averager, schedule, pace, pending)


def build_quorum_rounds(
    outer: OuterLoop,
    total_tokens: int | None,
    is_save_due: Callable[[Position, Position], bool] = lambda before, after: False,
) -> QuorumRounds:
    """Build the rounds that wait only for a quorum, for an outer loop whose config has `wait_for:
    quorum`.

    The run is over when `total_tokens` are committed, or never (None). After commits from one
    position to another for which `is_save_due`, no further round is prepared until
    `QuorumRounds.go_on`.
    """
    averager = outer.averager
    assert isinstance(averager, AgreedAverager), "gossip has no quorum"
    outer.total_tokens = total_tokens
    return QuorumRounds(
        averager,
        outer.pending,
        outer.schedule,
        outer.is_last,
        outer.catch_up,
        outer.worker,
        is_save_due,
    )
