"""The outer loop of one island: begin or join, then a round after every so many inner steps.

    launch   snapshot of a fragment's pseudo-gradient; its round runs behind the training   (outer/averaging.py)
    land     wait for the commit; the fragment's local params go on from the global params

With `outer.wait_for: quorum` (outer/listening.py) rounds go on while an island trains:

    heard    what was committed meanwhile; local params go on from it
    give     this island's progress, to a round that is waited for

Every rank of the island makes the same calls in the same order; the leader speaks to other islands.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from outer.agreement import Agreement, Interruption
from outer.averaging import Averaging, Side
from outer.coding import coding_of
from outer.config import OuterConfig
from outer.deadlines import Deadlines
from outer.donor import Donor
from outer.errors import BehindError, OuterError, TransportError
from outer.exchange import Params
from outer.flight import Flight
from outer.fragments import schedule_of
from outer.island_state import IslandState, Snapshot
from outer.listening import Heard, Listening
from outer.loop import LoopThread
from outer.network import Network
from outer.offer import Offer
from outer.pace import Pace
from outer.parts_cache import PartsCache
from outer.presence import Identity, Presence, standing_of
from outer.protocol import Protocol
from outer.reports import CaughtUp, Landing, RoundReport, Settings
from outer.state import Position
from outer.taking import Taken, Taker
from outer.team import Team
from outer.transfer import Fetch, Share
from outer.verdicts import rules_of

log = logging.getLogger(__name__)
T = TypeVar("T")

FINISH_SECONDS = 60.0
"""How long an island that has the last round stays for those that live and do not have it yet."""
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
        self._presence = self._build_presence(addresses) if team.is_leader else None
        self._averaging.presence = self._presence
        if self._presence is None:
            network.messenger.serve("vote", self._averaging.attempts.on_vote)
        self.listening = Listening(self._averaging, self._side, self.schedule, self._settings.total_tokens)
        self._taker = Taker(self._held, self._fetch, team, loop, lambda: self._leader.find_donors())
        self._has_entered_late = False

    @property
    def position(self) -> Position:
        """Where the run stands, as far as this island knows."""
        return self._held.mine.position

    @property
    def digest(self) -> str:
        """Of the global params and outer momentum that this island holds."""
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
        if self._team.on_leader(self._has_donors):
            self._take_state()
        elif self._settings.joins:
            raise OuterError("this island joins a run, and no island that has committed a round can be found in it")
        self._averaging.stand(is_coming=True)
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
        snapshot = self._snapshot(tokens, self.round)
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
        snapshot = self._snapshot(tokens, self.round)
        try:
            report = self._averaging.attempt(Offer(snapshot))
        except BehindError as behind:
            raise self._caught_up(behind, snapshot.weight) from None
        if report.is_committed:
            self._merge(snapshot)
        return report

    def heard(self, tokens: int) -> list[Heard]:
        """Rounds committed while this island trained, by now on `tokens` tokens since it gave. Raises as `land`."""
        return self._listened(self.listening.land, max(self._weights) + tokens)

    def give(self, tokens: int) -> Heard:
        """Give the progress made on `tokens` tokens to the round, when it is due; the round, committed. As `heard`."""
        snapshot = self._snapshot(tokens, self.listening.position.round)
        heard = self._listened(lambda: self.listening.give(snapshot), snapshot.weight)
        if heard.is_given:
            self._count(tokens, snapshot.fragment)
        return heard

    def global_params(self) -> AbstractContextManager[None]:
        """Local params are the global params while it lasts. No round may be on its way."""
        assert self._flight is None, "what a round on its way will commit is not known yet"
        return self._held.global_params()

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

    # -- a round's two ends ------------------------------------------------------------------------------------

    def _snapshot(self, tokens: int, number: int) -> Snapshot:
        fragment = self._held.space.fragment_of(number)
        pseudo_grads = self._held.pseudo_grads(fragment)
        norm = self._held.norm(pseudo_grads)
        return Snapshot(number, fragment, pseudo_grads, norm, tokens, self._weights[fragment] + tokens)

    def _merge(self, snapshot: Snapshot) -> None:
        self._side.hooks.reached("applied", snapshot.round)
        self._has_entered_late = False
        self._count(snapshot.tokens, snapshot.fragment)
        if self._ahead is None:
            self._held.merge(snapshot.fragment, self._config.mix)
        else:
            self._held.correct(self._ahead, snapshot.fragment)
            self._ahead = None

    def _count(self, tokens: int, fragment: int) -> None:
        """These tokens are given, and the fragment with them."""
        self._weights = [weight + tokens for weight in self._weights]
        self._weights[fragment] = 0

    def _listened(self, land: Callable[[], T], weight: int) -> T:
        try:
            return land()
        except BehindError as behind:
            caught = self._caught_up(behind, weight)
            if not caught.is_kept:
                self.listening.drop_progress()
            self.listening.start()
            raise caught from None

    def _interruption(self, steps_left: int) -> Interruption:
        if self._flight is not None:
            # It is ready for its round, so nobody waits for it; only what has ended the round matters.
            return "behind" if self._flight.has_failed else ""
        seconds = steps_left * self.pace.step_seconds
        return self._leader.interruption(seconds, entered_late=self._has_entered_late)

    # -- another island's state -----------------------------------------------------------------------------

    def _has_donors(self) -> bool:
        """Whether any island has committed a round; waited for when this one must not begin a run."""
        deadline = time.monotonic() + (DONOR_WAIT_SECONDS if self._settings.joins else 0.0)
        while not (found := self._leader.find_donors()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return bool(found)

    def _caught_up(self, behind: BehindError, weight: int, sent: dict[int, torch.Tensor] | None = None) -> CaughtUp:
        """Take the state that survives; what is raised then says whether this island's progress was put on top of it.

        It is, when exactly one commit was missed, of this island's own history, and that commit does not contain it
        already. What is re-based once and misses a commit again is dropped. `weight`: tokens of the progress.
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
        )
        if is_kept:
            self._held.rebase(progress)
        else:
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
        config = self._config
        share = Share(held.space, held.exchange.carried, self._side.coding, config.optimizer, config.start_islands)
        return Fetch(self._network.messenger, [], share, cache, self._side.hooks)

    # -- plumbing -------------------------------------------------------------------------------------------

    def _build_presence(self, addresses: Sequence[tuple[str, str]]) -> Presence:
        config, identity, membership = self._config, self._identity, self._network.membership
        assert membership is not None, "the leader has a membership"
        rules = rules_of(config, len(self._held.space.parts), self._settings.max_tokens)
        protocol = Protocol(identity.island, rules, standing_of(self._held, is_coming=False))
        messenger = self._network.messenger
        agreement = Agreement(protocol, messenger, membership, self._side.deadlines, identity.config_hash)
        agreement.on_no = self._averaging.attempts.note_no
        return Presence(identity, addresses, self._held, agreement, membership, self._loop)

    @property
    def _leader(self) -> Presence:
        assert self._presence is not None, "only the leader speaks for the island"
        return self._presence
