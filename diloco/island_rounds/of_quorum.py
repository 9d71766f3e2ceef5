"""Turns inner steps into rounds that wait for a quorum only (`outer.wait_for: quorum`).

    (inner step, land what was committed) x own inner steps -> contribute, wait for the round -> ... until the tokens
    are done

Whoever trains calls `step` after each inner step, as with IslandRounds. Islands contribute different numbers of times,
so the position of the run follows from the committed tokens, not from rounds: a cycle is over when as many tokens are
committed as all islands that begin train on in `outer.inner_steps` steps. States are saved right after the island has
contributed, because no round that others could commit is being prepared then.
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
    """Inner steps of the run behind so many committed tokens, if all islands that begin had made equally many."""
    return tokens // (config.optimizer.tokens_per_step * config.outer.start_islands)


class QuorumIslandRounds:
    """Counts inner steps, contributes, and lands rounds. Every rank of the island makes the same calls together."""

    def __init__(self, outer: OuterLoop, config: RunConfig, events: QuorumEvents, *, pauses: bool = False) -> None:
        """`outer` has begun. With `pauses` no round is prepared after a contribution until `go_on` or the next step."""
        self._outer, self._config, self._events, self._pauses = outer, config, events, pauses
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
        """Why the island leaves before the run is over, or ""."""
        return "" if self.rounds.is_over else self._why_stop

    @property
    def inner_step(self) -> int:
        """Inner steps of the run behind the next one, from which the schedule of the learning rate follows."""
        return count_inner_steps(self._config, self.rounds.position.tokens) + self.made.steps

    @property
    def cycle(self) -> int:
        """The cycle of the last round that has landed."""
        return self._cycle_at(self.rounds.position.tokens)

    @property
    def is_settled(self) -> bool:
        """Whether no round is in preparation, so that the progress can be saved as it is."""
        return self.is_over or self.rounds.is_quiet

    @property
    def resume_point(self) -> ResumePoint:
        """The progress that is saved. No round may be in preparation."""
        assert self.rounds.is_quiet, "what a round in flight will commit is not known yet"
        return ResumePoint(self.made.steps, self.made)

    def resume(self, point: ResumePoint) -> None:
        """Call this before `proceed` to go on with the progress that was saved."""
        self.made = point.made
        self.rounds.begin_progress(point.made.steps)

    def proceed(self) -> None:
        """Go on until an inner step is wanted or the run is over. Raises OuterError when it cannot go on."""
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
        """An inner step was made on so many tokens: land what is committed, contribute if that is due."""
        self.go_on()
        self.made += Progress(1, tokens)
        with self._catching_up():
            for committed in self.rounds.land(self.made.tokens):
                self._land(committed)
        self.proceed()

    def land_now(self) -> None:
        """Contribute what is made, so that no round is being prepared and the state can be saved. Raises OuterError."""
        has_given = self.rounds.is_quiet
        while not has_given and not self.is_over:
            with self._catching_up():
                has_given = self._contribute()

    def go_on(self) -> None:
        """Prepare rounds again, after a pause for saving."""
        self.rounds.go_on()

    def _contribute(self) -> bool:
        """Contribute to a round and wait for it. False if its plan had been fixed before: then the progress is kept."""
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
        """If others have committed without this island within the block, it goes on from their state."""
        try:
            yield
        except CaughtUp as caught:
            progress, self.made = self.made, self.made if caught.is_kept else NO_PROGRESS
            self._events.caught_up(caught, progress)
