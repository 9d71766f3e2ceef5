"""The outer loop of one island: begin or join, then a round after every so many inner steps.

    launch   snapshot of a fragment's pseudo-gradient; its round runs behind the training   (outer/averaging.py)
    land     wait for the commit; the fragment's local params go on from the global params

With `outer.wait_for: quorum` (outer/listening.py) rounds go on while an island trains:

    heard    what was committed meanwhile; local params go on from it
    give     this island's progress, to a round that is waited for

Every rank of the island makes the same calls in the same order; the leader speaks to other islands.
"""

import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch

from outer import saved
from outer.agreement import Interruption
from outer.averaging import Averaging, Side, presence_of
from outer.coding import coding_of
from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.donor import Donor
from outer.entering import fetch_of, has_donors
from outer.errors import BehindError, OuterError, TransportError
from outer.exchange import Params
from outer.flight import Flight
from outer.fragments import schedule_of, steps_behind
from outer.island_state import IslandState, Snapshot
from outer.listening import Listening
from outer.loop import LoopThread
from outer.network import Network
from outer.offer import Offer
from outer.pace import Pace
from outer.presence import Identity, Presence
from outer.reading import Reading
from outer.reports import CaughtUp, Landing, RoundReport, Settings
from outer.runs import count
from outer.state import Position
from outer.taking import Taken, Taker
from outer.team import Team
from outer.unsent import Unsent

log = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
"""How long an island that has the last round stays for those that live and do not have it yet."""


class OuterLoop:
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
        self._config, self._identity, self._settings = config, identity, settings or Settings()
        self._team, self._network, self._loop = team, network, loop
        coding, hooks = coding_of(config), self._settings.hooks
        self.schedule = schedule_of(config)
        self._held = IslandState(config, coding, params, team)
        reading = Reading(identity.island, self._settings.index, identity.incarnation, self._held.terms)
        self.unsent = Unsent(self._held, reading, config.fragments)
        deadlines = Deadlines(config.wait_seconds)
        self.pace = Pace(config, identity.island, deadlines, self._settings.now)
        self._side = Side(
            config, identity, self._held, self.unsent, coding, team, network, loop, hooks, deadlines, self.pace
        )
        donor = Donor(self._held.mine, network.messenger, hooks)
        self._averaging = Averaging(self._side, donor)
        self._flight: Flight | None = None
        self._ahead: dict[int, torch.Tensor] | None = None
        """What local params of the fragment on its way went on from, by carried part; None: they were left alone."""
        addresses = team.gather((network.transport.address, network.messenger.address))
        self._presence = presence_of(self._side, addresses, self._settings) if team.is_leader else None
        self._averaging.presence = self._presence
        if self._presence is not None:
            self._presence.agreement.on_no = self._averaging.attempts.note_no
        else:
            network.messenger.serve("vote", self._averaging.attempts.on_vote)
        total = self._settings.total_tokens
        self.listening = Listening(self._averaging, self._side, self.schedule, total, self._caught_up)
        fetch = partial(fetch_of, self._side, self._settings)
        self._taker = Taker(self._held, fetch, team, loop, lambda: self._leader.find_donors())
        self._has_entered_late = False
        self._resumed_units = 0
        """Read by the progress that a checkpoint held."""

    @property
    def position(self) -> Position:
        """Where the run stands, as far as this island knows."""
        return self._held.mine.position

    @property
    def digest(self) -> str:
        """Of the committed state that this island holds."""
        return self._held.digest

    @property
    def reading(self) -> Reading:
        """What text this rank reads."""
        return self.unsent.reading

    @property
    def round(self) -> int:
        """The round that inner steps are made for now: after the one on its way, if there is one."""
        return self.position.round if self._flight is None else self._flight.snapshot.round + 1

    @property
    def in_flight(self) -> int | None:
        """The round on its way, if there is one."""
        return None if self._flight is None else self._flight.snapshot.round

    # -- an island's life -------------------------------------------------------------------------------------

    def begin(self) -> Position:
        """Enter the run: with the islands' state if they have committed a round, else from the start with them."""
        if self._presence is not None:
            self._presence.announce()
        joins, is_resumed = self._settings.joins, self.position.round > 0
        is_behind = self._team.on_leader(lambda: has_donors(self._side, self._leader, joins=joins))
        if is_behind:
            is_behind = self._is_taken(or_resumed=is_resumed)
        elif joins:
            raise OuterError("this island joins a run, and no island that has committed a round can be found in it")
        # A state that was saved is as good as one just committed: others may take it.
        included = [] if is_resumed and not is_behind else None
        self.reading.begin(self.position.account)
        if not is_behind:
            self.reading.take_up(self._resumed_units)
        self._averaging.stand(is_coming=True, included=included)
        return self.position

    def inner_steps(self) -> int:
        """How many this island makes for `round`, beginning now: the schedule's, or fewer with dynamic local steps."""
        steps = self.schedule.steps(self.round)
        # The leader's word: a round on its way may have told another rank's pace something new already.
        return self._team.on_leader(lambda: self.pace.begin(steps))

    def interruption(self, steps_left: int) -> Interruption:
        """Why inner steps should end now, the same on every rank; "": go on. Call it after each inner step."""
        return self._team.on_leader(lambda: self._interruption(steps_left))

    def launch(self, tokens: int) -> None:
        """Send `round` on its way with the island's progress since the last launch, made on `tokens` tokens.

        The round before has landed. `land` must be called before the next launch.
        """
        assert self._flight is None, "one round is on its way at a time"
        snapshot = self.unsent.snapshot(self.round, tokens)
        if self._config.eager:
            self._ahead = self._held.look_ahead(snapshot, self._averaging.share)
        self._flight = Flight(self._averaging, snapshot)

    def land(self) -> Landing:
        """Wait for the round on its way, and go on from what it has committed.

        Raises CaughtUp when others have committed without this island; OuterError when its own pseudo-gradient
        cannot be used, or too few islands come, or too many attempts have failed.
        """
        assert self._flight is not None, "there is a round on its way"
        flight, snapshot = self._flight, self._flight.snapshot
        try:
            reports, waited = flight.land()
        except BehindError as behind:
            self._flight = None
            raise self._caught_up(behind, snapshot.weight, snapshot.pseudo_grads) from None
        self._flight = None
        self._merge(snapshot)
        return Landing(reports, waited)

    def attempt(self, tokens: int) -> RoundReport:
        """One attempt at `round`, waited for. Not committed: nothing has changed, call it again. Raises as `land`."""
        snapshot = self.unsent.snapshot(self.round, tokens)
        try:
            report = self._averaging.attempt(Offer(snapshot))
        except BehindError as behind:
            raise self._caught_up(behind, snapshot.weight) from None
        if report.is_committed:
            self._merge(snapshot)
        return report

    def global_params(self) -> AbstractContextManager[None]:
        """Local params are the global params while it lasts. No round may be on its way."""
        assert self._flight is None, "what a round on its way will commit is not known yet"
        return self._held.global_params()

    def moment_steps(self, landed: int | None = None) -> dict[str, int]:
        """By parameter, the inner steps of the run behind the second moments that local ones were overwritten with.

        By the round that has just landed, if it sent them; None: by the state of others. 0: they were never averaged.
        """
        return steps_behind(self._held.space, self.schedule, self.position.round, landed)

    def finish(self) -> None:
        """The run is over: stay until the others have the last round, take it from them if this one has not."""
        try:
            if self._team.on_leader(lambda: self._leader.linger(FINISH_SECONDS)):
                self._take_state()
        except TransportError as error:
            log.warning("the others end with another state than this island, and it cannot be taken: %s", error)
        self.leave()

    def leave(self, steps: int = 0) -> None:
        """Say goodbye, `steps` inner steps into the round; only the goodbye itself is waited for."""
        if self._presence is not None:
            self._presence.leave(steps)

    def saved(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What a checkpoint holds: this rank's tensors as they are, and facts. No round may be on its way."""
        is_quiet = self._flight is None and self.listening.is_quiet
        assert is_quiet, "what a round on its way will commit is not known yet"
        reducer, num_units = self._averaging.reducer, count(self.reading.read)
        facts = saved.facts_of(self._held, reducer, self.unsent.weights, self._averaging.share, num_units)
        return saved.tensors_of(self._held, reducer), facts

    def room(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Zeros to load what this rank needs of the saved tensors into, for `restore`."""
        return saved.room_for(self._held, self._averaging.reducer, names)

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: object) -> None:
        """Go on from what was saved, before `begin`; local params have been loaded. Raises InputError."""
        read = saved.read_facts(facts)
        saved.restore(self._held, self._averaging.reducer, read, tensors)
        self.unsent.weights, self._averaging.share, self._resumed_units = read.weights, read.share, read.units
        if self._presence is not None:
            self._presence.resume()

    # -- a round's two ends ------------------------------------------------------------------------------------

    def _merge(self, snapshot: Snapshot) -> None:
        self._side.hooks.reached("applied", snapshot.round)
        self._has_entered_late = False
        self.unsent.landed(snapshot, self.position)
        if self._ahead is None:
            self._held.merge(snapshot.round, self._config.mix)
        else:
            self._held.correct(self._ahead, snapshot.round)
            self._ahead = None

    def _interruption(self, steps_left: int) -> Interruption:
        if self.pace.seconds_left <= 0:
            return "time is up"
        if self._flight is not None:
            # It is ready for its round, so nobody waits for it; only what has ended the round matters.
            return "behind" if self._flight.has_failed else ""
        seconds = min(steps_left * self.pace.step_seconds, self.pace.seconds_left)
        return self._leader.interruption(seconds, entered_late=self._has_entered_late)

    # -- another island's state -----------------------------------------------------------------------------

    def _caught_up(self, behind: BehindError, weight: int, sent: dict[int, torch.Tensor] | None = None) -> CaughtUp:
        """Take the state that survives; what is raised then says whether this island's progress was put on top of it.

        It is, when exactly one commit was missed, of this island's own history, that commit does not contain it
        already, and no other island has been given what it read. What is re-based once and misses a commit again is
        dropped. `weight`: tokens of the progress.
        """
        digest, progress = self.digest, self._held.pseudo_grads()
        for part, values in (self._ahead or {}).items():
            # Trained from there; what was sent had been taken out.
            progress[part] += values - self._held.mine.parts[part] + (sent or {})[part]
        self._ahead = None
        taken = self._take_state()
        is_same = taken.base_digest == digest
        is_kept = (
            self._config.missed_progress == "rebase"
            and is_same
            and self._identity.incarnation not in taken.description.included
            and 2 * weight <= self._settings.max_tokens
            and self.reading.go_on(self.position.account)
        )
        if is_kept:
            self._held.rebase(progress)
        else:
            self.unsent.drop(self.position)
        if not is_same:
            self._averaging.reducer.forget()
        self._averaging.stand(is_coming=True)
        return CaughtUp(behind.cause, is_kept=is_kept)

    def _is_taken(self, *, or_resumed: bool) -> bool:
        """The state of others is taken; False: it cannot be, and this island goes on from the one that was saved."""
        try:
            self._take_state()
        except TransportError as error:
            if not or_resumed:
                raise
            # Records outlive islands: those that were ahead may have died with their last rounds.
            log.warning("going on from the checkpoint: %s", error)
            return False
        return True

    def _take_state(self) -> Taken:
        """The state of others, in the place of this island's. Raises TransportError."""
        self._averaging.stand(is_coming=False)
        taken = self._taker.take()
        self._has_entered_late = True
        self.pace.interrupt()
        self._averaging.stand(is_coming=False, included=taken.description.included)
        return taken

    # -- plumbing -------------------------------------------------------------------------------------------

    @property
    def _leader(self) -> Presence:
        assert self._presence is not None, "only the leader speaks for the island"
        return self._presence
