"""Turns inner steps into rounds that wait for a quorum only (`outer.wait_for: quorum`).

    (inner step, land what was committed) x own inner steps -> contribute, wait for the round -> ...

A training loop calls `step` after each inner step, as with IslandRounds. Islands contribute
different numbers of times, so the position of the run follows from the committed tokens, not from
rounds: a cycle is over when the committed tokens are those of `outer.inner_steps` steps of all
islands that begin. The stages of the run follow from the tokens, too. States are saved while no
round is being prepared that others could commit: right after the island has contributed, and after
the round that ends a cycle to be saved, which is the same round on all islands.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from diloco.config.schema import RunConfig, count_inner_steps
from diloco.island_rounds.events import QuorumEvents
from diloco.runtime.progress import NO_PROGRESS, Progress, ResumePoint
from outer.loop import OuterLoop, build_quorum_rounds
from outer.report import CaughtUp
from outer.rounds.quorum import CommittedRound
from outer.state.earlier import EarlierState
from outer.state.part_state import Position


class QuorumIslandRounds:
    """Counts inner steps, contributes, and lands rounds. Every rank of the island makes the same
    calls together.
    """

    def __init__(
        self,
        outer: OuterLoop,
        config: RunConfig,
        events: QuorumEvents,
        *,
        pauses: bool = False,
        save_every: int | None = None,
    ) -> None:
        """`outer` must have begun.

        With `pauses`, no round is prepared between a contribution and the next step or `go_on`.
        `save_every`: number of cycles after which all islands save the same state; None: never.
        """
        self._outer = outer
        self._config = config
        self._events = events
        self._pauses = pauses
        self._save_every = save_every
        self.rounds = build_quorum_rounds(outer, config.total_tokens, self._is_save_due)
        self.made = NO_PROGRESS
        """Progress since the island last contributed."""
        self._has_started = False
        self._why_stop = ""

    @property
    def is_over(self) -> bool:
        """Whether the run's tokens are committed, or this island leaves."""
        return bool(self._why_stop) or self.rounds.is_over

    @property
    def stopped(self) -> str:
        """Why the island leaves before the run is over; empty if it does not."""
        return "" if self.rounds.is_over else self._why_stop

    @property
    def inner_step(self) -> int:
        """Inner steps of the run before the next one; they determine its learning rate."""
        return self.committed_steps + self.made.steps

    @property
    def committed_steps(self) -> int:
        """Inner steps of the run whose tokens are committed in the last round that has landed."""
        return count_inner_steps(self._config, self.rounds.position.tokens)

    @property
    def cycle(self) -> int:
        """The cycle of the last round that has landed."""
        return self._cycle_at(self.rounds.position.tokens)

    @property
    def is_settled(self) -> bool:
        """Whether no round is being prepared, so that the progress can be saved as it is."""
        return self.is_over or self.rounds.is_quiet

    @property
    def resume_point(self) -> ResumePoint:
        """The progress to save. No round may be in preparation."""
        assert self.rounds.is_quiet, "what a round in flight will commit is not known yet"
        return ResumePoint(self.made.steps, self.made)

    def resume(self, point: ResumePoint) -> None:
        """Go on with the progress that was saved. Call this before `proceed`."""
        self.made = point.made
        self.rounds.begin_progress(point.made.steps)

    def proceed(self) -> None:
        """Make rounds until an inner step is due or the run is over.

        Raises OuterError if it cannot go on.
        """
        if not self._has_started:
            self._has_started = True
            self.rounds.start()
        while not self.is_over:
            with self._catching_up():
                # Only a commit gives this island more data.
                if not self.rounds.is_due() and self._outer.cursor.num_left > 0:
                    self._events.begins(self.inner_step, self.rounds.position.ledger)
                    return
                self._contribute()

    def step(self, tokens: int) -> None:
        """Count an inner step on `tokens` tokens.

        Land committed rounds, and contribute if that is due.
        """
        self.go_on()
        self.made += Progress(1, tokens)
        with self._catching_up():
            for committed in self.rounds.land(self.made.tokens):
                self._land(committed)
        self.proceed()

    def go_back(self, earlier: EarlierState) -> None:
        """Contribute now, and offer the others to go back to this earlier state together.

        Call it when further inner steps are useless. The round averages as usual unless more than
        half of the participants offer the same state. The offer stands in later rounds, observed
        ones too, until the rounds withdraw it. Raises OuterError.
        """
        self.made += Progress(1, 0)  # The last step, which has not been counted.
        self.rounds.offer(earlier)
        with self._catching_up():
            self._contribute()
        self.proceed()

    def land_now(self) -> None:
        """Contribute the progress so far: then no round is being prepared, and saving is possible.

        Raises OuterError.
        """
        has_given = self.rounds.is_quiet
        while not has_given and not self.is_over:
            with self._catching_up():
                has_given = self._contribute()

    def go_on(self) -> None:
        """Prepare rounds again, after a pause for saving."""
        self.rounds.go_on()

    def _contribute(self) -> bool:
        """Contribute to a round and wait for it.

        Return False if the round's plan had been fixed before: then the progress is kept.
        """
        self.go_on()
        self._events.launches(self.made)
        committed = self.rounds.contribute(self.made.tokens, holds=True)
        self._land(committed)
        return committed.is_given

    def _land(self, committed: CommittedRound) -> None:
        made = self.made
        if committed.is_given or committed.is_dropped:
            self.made = NO_PROGRESS
        self._events.landed(committed, made, self._cycle_at(committed.position.tokens))
        if committed.is_given:
            self._why_stop = self._events.contributed(committed.position.round)
            if not self._why_stop and not self._pauses:
                self.go_on()
        elif committed.is_held:
            self._events.may_save()
            self.go_on()

    def _is_save_due(self, before: Position, after: Position) -> bool:
        """Return whether a cycle that is to be saved ends between these positions."""
        every = self._save_every
        return (
            every is not None
            and self._cycle_at(after.tokens) // every > self._cycle_at(before.tokens) // every
        )

    def _cycle_at(self, tokens: int) -> int:
        outer = self._config.outer
        return min(count_inner_steps(self._config, tokens) // outer.inner_steps, outer.rounds)

    @contextmanager
    def _catching_up(self) -> Iterator[None]:
        """Go on from the state of others if they commit without this island within the block."""
        try:
            yield
        except CaughtUp as caught:
            progress = self.made
            self.made = self.made if caught.is_kept else NO_PROGRESS
            self._events.caught_up(caught, progress)
