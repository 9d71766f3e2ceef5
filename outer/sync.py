"""The outer loop of one island: begin or join, then a round after every so many inner steps.

    launch   snapshot of a fragment's pseudo-gradient; its round runs behind the training   (outer/averaging.py)
    land     wait for the commit; the fragment's local params go on from the global params

Every rank of the island makes the same calls in the same order; the leader speaks to other islands.
"""

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

import torch

from outer import saved
from outer.agreement import Interruption
from outer.averaging import Averaging, Side, presence_of
from outer.coding import coding_of
from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.donor import Donor
from outer.errors import BehindError, OuterError, TransportError
from outer.exchange import Params
from outer.flight import Flight
from outer.fragments import schedule_of, steps_behind
from outer.island_state import IslandState, Snapshot
from outer.loop import LoopThread
from outer.network import Network
from outer.pace import Pace
from outer.parts_cache import PartsCache
from outer.presence import Identity, Presence
from outer.reading import Reading
from outer.reports import CaughtUp, Landing, RoundReport, Settings
from outer.runs import count
from outer.state import Position
from outer.taking import Taken, Taker
from outer.team import Team
from outer.transfer import Fetch, Share

log = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
"""How long an island that has the last round stays for those that live and do not have it yet."""
RESUME_SECONDS = 60.0
"""How long an island that goes on from a checkpoint waits for the others to do so; then it goes on alone."""
DONOR_WAIT_SECONDS = 10.0
"""How long an island that must not begin a run waits for one that can give a state."""


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
        self.reading = Reading(identity.island, self._settings.index, identity.incarnation, self._held.terms)
        self._weights = [0] * config.fragments
        """By fragment: tokens trained since it was sent last, up to the last round that landed."""
        deadlines = Deadlines(config.wait_seconds)
        self.pace = Pace(config, identity.island, deadlines)
        self._side = Side(config, identity, self._held, coding, team, network, loop, hooks, deadlines, self.pace)
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
        self._taker = Taker(self._held, self._fetch, team, loop, lambda: self._leader.find_donors())
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
        included = None
        if is_behind := self._team.on_leader(self._has_donors):
            self._take_state()
        elif self._settings.joins:
            raise OuterError("this island joins a run, and no island that has committed a round can be found in it")
        elif self.position.round:
            included = []  # A state that was saved is as good as one just committed: others may take it.
        self.reading.begin(self.position.account)
        if not is_behind:
            self.reading.take_up(self._resumed_units)
        self._averaging.stand(is_coming=True, included=included)
        return self.position

    def inner_steps(self) -> int:
        """How many this island makes for `round`: the schedule's, or fewer with dynamic local steps."""
        steps = self.schedule.steps(self.round)
        # The leader's word: a round on its way may have told another rank's pace something new already.
        return self._team.on_leader(lambda: self.pace.of(steps))

    def interruption(self, steps_left: int) -> Interruption:
        """Why inner steps should end now, the same on every rank; "": go on. Call it after each inner step."""
        return self._team.on_leader(lambda: self._interruption(steps_left))

    def launch(self, tokens: int) -> None:
        """Send `round` on its way with the island's progress since the last launch, made on `tokens` tokens.

        The round before has landed. `land` must be called before the next launch.
        """
        assert self._flight is None, "one round is on its way at a time"
        snapshot = self._snapshot(tokens)
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
            raise self._caught_up(behind, snapshot) from None
        self._flight = None
        self._merge(snapshot)
        return Landing(reports, waited)

    def attempt(self, tokens: int) -> RoundReport:
        """One attempt at `round`, waited for. Not committed: nothing has changed, call it again. Raises as `land`."""
        snapshot = self._snapshot(tokens)
        try:
            report = self._averaging.attempt(snapshot)
        except BehindError as behind:
            raise self._caught_up(behind, snapshot) from None
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
        assert self._flight is None, "what a round on its way will commit is not known yet"
        reducer = self._averaging.reducer
        facts = saved.facts_of(self._held, reducer, self._weights, self._averaging.share, count(self.reading.read))
        return saved.tensors_of(self._held, reducer), facts

    def room(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Zeros to load what this rank needs of the saved tensors into, for `restore`."""
        return saved.room_for(self._held, self._averaging.reducer, names)

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: object) -> None:
        """Go on from what was saved, before `begin`; local params have been loaded. Raises InputError."""
        read = saved.read_facts(facts)
        saved.restore(self._held, self._averaging.reducer, read, tensors)
        self._weights, self._averaging.share, self._resumed_units = read.weights, read.share, read.units
        if self._presence is not None:
            self._presence.resume()

    # -- a round's two ends ------------------------------------------------------------------------------------

    def _snapshot(self, tokens: int) -> Snapshot:
        fragment = self._held.space.fragment_of(self.round)
        pseudo_grads = self._held.pseudo_grads(self.round)
        norm = self._held.norm(pseudo_grads)
        weight = self._weights[fragment] + tokens
        return Snapshot(self.round, fragment, pseudo_grads, norm, tokens, weight, self.reading.read)

    def _merge(self, snapshot: Snapshot) -> None:
        self._side.hooks.reached("applied", snapshot.round)
        self._has_entered_late = False
        self.reading.settle(self.position.account, count(snapshot.units))
        self._weights = [weight + snapshot.tokens for weight in self._weights]
        self._weights[snapshot.fragment] = 0
        if self._ahead is None:
            self._held.merge(snapshot.round, self._config.mix)
        else:
            self._held.correct(self._ahead, snapshot.round)
            self._ahead = None

    def _interruption(self, steps_left: int) -> Interruption:
        if self._flight is not None:
            # It is ready for its round, so nobody waits for it; only what has ended the round matters.
            return "behind" if self._flight.has_failed else ""
        seconds = steps_left * self.pace.step_seconds
        return self._leader.interruption(seconds, entered_late=self._has_entered_late)

    # -- another island's state -----------------------------------------------------------------------------

    def _has_donors(self) -> bool:
        """Whether others hold a state that survives; waited for when this one must not begin, or go on, without."""
        is_resumed = self.position.round > 0
        seconds = DONOR_WAIT_SECONDS if self._settings.joins else RESUME_SECONDS * is_resumed
        deadline = time.monotonic() + seconds
        while not (found := self._leader.find_donors()) and time.monotonic() < deadline:
            if is_resumed and self._leader.num_islands >= self._config.start_islands:
                break
            time.sleep(0.2)
        return bool(found)

    def _caught_up(self, behind: BehindError, snapshot: Snapshot) -> CaughtUp:
        """Take the state that survives; what is raised then says whether this island's progress was put on top of it.

        It is, when exactly one commit was missed, of this island's own history, that commit does not contain it
        already, and no other island has been given what it read. What is re-based once and misses a commit again is
        dropped.
        """
        digest, progress = self.digest, self._held.pseudo_grads()
        for part, values in (self._ahead or {}).items():
            # Trained from there; what the snapshot holds had been taken out.
            progress[part] += values - self._held.mine.parts[part] + snapshot.pseudo_grads[part]
        self._ahead = None
        taken = self._take_state()
        is_same = taken.base_digest == digest
        is_kept = (
            self._config.missed_progress == "rebase"
            and is_same
            and self._identity.incarnation not in taken.description.included
            and 2 * snapshot.weight <= self._settings.max_tokens
            and self.reading.go_on(self.position.account)
        )
        if is_kept:
            self._held.rebase(progress)
        else:
            self.reading.begin(self.position.account)
            self._weights = [0] * len(self._weights)
        if not is_same:
            self._averaging.reducer.forget()
        self._averaging.stand(is_coming=True)
        return CaughtUp(behind.cause, is_kept=is_kept)

    def _take_state(self) -> Taken:
        """The state of others, in the place of this island's. Raises TransportError."""
        self._averaging.stand(is_coming=False)
        taken = self._taker.take()
        self._has_entered_late = True
        self.pace.interrupt()
        self._averaging.stand(is_coming=False, included=taken.description.included)
        return taken

    def _fetch(self) -> Fetch:
        folder, held = self._settings.cache_dir, self._held
        cache = None
        if folder is not None:
            run = self._identity.config_hash
            cache = PartsCache(folder / f"rank-{self._team.rank}", held.space.fingerprint, run)
        share = Share(held.space, held.exchange.carried, self._side.coding, self._config.optimizer)
        return Fetch(self._network.messenger, [], share, cache, self._side.hooks)

    # -- plumbing -------------------------------------------------------------------------------------------

    @property
    def _leader(self) -> Presence:
        assert self._presence is not None, "only the leader speaks for the island"
        return self._presence
