"""Turns inner steps into rounds that wait for a quorum only (`outer.wait_for: quorum`).

    (inner step, land what was committed) x own inner steps -> contribute, wait for the round -> ...

A training loop calls `step` after each inner step, as with IslandRounds. Islands contribute
different numbers of times, so the position of the run follows from the committed tokens, not from
rounds: a cycle is over when the committed tokens are those of `outer.inner_steps` steps of all
islands that begin. States are saved right after the island has contributed, because then no round
is being prepared that others could commit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from diloco.config.schema import RunConfig
from diloco.island_rounds.events import QuorumEvents
from diloco.runtime.progress import NO_PROGRESS, Progress, ResumePoint
from outer.loop import OuterLoop, build_quorum_rounds
from outer.report import CaughtUp
from outer.rounds.quorum import CommittedRound


def count_inner_steps(config: RunConfig, tokens: int) -> int:
    """Convert committed tokens of the run to inner steps, shared equally by the islands that begin."""
    return tokens // (config.optimizer.tokens_per_step * config.outer.start_islands)


class QuorumIslandRounds:
    """Counts inner steps, contributes, and lands rounds. Every rank of the island makes the same calls together."""

    def __init__(self, outer: OuterLoop, config: RunConfig, events: QuorumEvents, *, pauses: bool = False) -> None:
        """`outer` must have begun.

        With `pauses`, no round is prepared between a contribution and the next step or `go_on`.
        """
        self._outer = outer
        self._config = config
        self._events = events
        self._pauses = pauses
        self.rounds = build_quorum_rounds(outer, config.total_tokens)
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
        return count_inner_steps(self._config, self.rounds.position.tokens) + self.made.steps

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
                    self._events.begins(self.inner_step)
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
