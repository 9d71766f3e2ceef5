"""Turns the inner steps of an island into rounds.

A training loop calls `step` after each inner step:

    rounds.proceed()
    while not rounds.is_over:
        (one inner step on the unit of data that `outer.cursor.next_unit()` gives)
        rounds.step(tokens)

`diloco train` does so (island.py). With `outer.delay` a round is launched after its inner steps and
lands some steps later. Without a delay, `step` returns when the round has landed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from diloco.island_rounds.events import RoundEvents
from diloco.runtime.progress import NO_PROGRESS, Progress, ResumePoint
from outer.loop import OuterLoop
from outer.report import CaughtUp
from outer.state.earlier import EarlierState


class IslandRounds:
    """Counts inner steps, launches and lands rounds. Every rank of the island makes the same calls
    together.
    """

    def __init__(self, outer: OuterLoop, num_rounds: int, events: RoundEvents) -> None:
        """`outer` must have begun. `num_rounds` is the number of rounds of the whole run."""
        self._outer = outer
        self._num_rounds = num_rounds
        self._events = events
        self.made = NO_PROGRESS
        """Progress since the last launch."""
        self.sent = NO_PROGRESS
        """Progress in the round in flight."""
        self.inner_step = 0
        """Inner steps of the run before the next one; they determine its learning rate."""
        self._begun_at = self._last_step = 0
        self.stopped = ""
        """Why the island leaves before the run is over; empty if it does not."""

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is committed, or this island leaves."""
        return bool(self.stopped) or self._outer.position.round >= self._num_rounds

    @property
    def is_settled(self) -> bool:
        """Whether no round is in flight, so that the state can be saved as it is."""
        return self._outer.in_flight is None

    @property
    def resume_point(self) -> ResumePoint:
        """The position within the round, for a checkpoint. No round may be in flight."""
        return ResumePoint(
            max(self.inner_step - self._outer.schedule.begin(self._outer.round), 0), self.made
        )

    def resume(self, point: ResumePoint) -> None:
        """Go on in the middle of a round. Call this before `proceed`."""
        self.made = point.made
        self._begun_at = point.steps

    def proceed(self) -> None:
        """Make rounds until an inner step is due or the run is over.

        Raises OuterError if it cannot go on.
        """
        while not self.is_over:
            with self._catching_up():
                self._begin_round()
                # A checkpoint may have been saved after all inner steps of its round.
                if self._outer.cursor.num_left > 0 and self.inner_step < self._last_step:
                    return
                self._end_round()

    def step(self, tokens: int) -> None:
        """Count an inner step on `tokens` tokens; land and launch the rounds that are due.

        Raises OuterError.
        """
        self.made += Progress(1, tokens)
        self.inner_step += 1
        with self._catching_up():
            if not self._ends_round():
                return
            self._end_round()
        self.proceed()

    def go_back(self, earlier: EarlierState) -> None:
        """End the round now, and offer the others to go back to this earlier state together.

        Call it when further inner steps are useless. The round averages as usual unless more than
        half of the islands offer the same state. Raises OuterError.
        """
        self.made += Progress(1, 0)  # The last step, which has not been counted.
        self.inner_step += 1
        with self._catching_up():
            if self._outer.in_flight is not None:
                self._land()
            self._end_round(earlier)
        self.proceed()

    def land_now(self) -> None:
        """Land the round in flight early, if there is one, so that the state can be saved.

        Local params then continue from the global params earlier than planned, which is no error.
        Raises OuterError.
        """
        if self._outer.in_flight is None:
            return
        with self._catching_up():
            self._land()
            return
        self.proceed()

    def go_on(self) -> None:
        """Do nothing: after a round of all islands, nothing waits for the training loop."""

    def _begin_round(self) -> None:
        outer = self._outer
        if outer.in_flight is not None and (outer.cursor.num_left == 0 or outer.begins_stage):
            # Only a commit gives this island more data, or the data of the next stage.
            self._land()
        # The learning rate follows from the round, however many steps this island made in the last
        # one.
        begin = outer.schedule.begin(outer.round)
        self.inner_step = begin + self._begun_at
        self._begun_at = 0
        self._events.begins(self.inner_step, outer.position.ledger)
        self._last_step = begin + outer.inner_steps()

    def _ends_round(self) -> bool:
        """Return whether the round's inner steps are done, or more of them would be wasted.

        Lands the last round if that is due.
        """
        outer = self._outer
        steps_left = self._last_step - self.inner_step
        cause = outer.interruption(steps_left)
        is_done = steps_left <= 0 or bool(cause) or outer.cursor.num_left == 0
        num_done = self.inner_step - outer.schedule.begin(outer.round)
        if outer.in_flight is not None and (is_done or num_done >= outer.schedule.delay):
            self._land()
        if outer.in_flight is None:
            self._events.may_save(is_asked=False)
        return is_done

    def _end_round(self, earlier: EarlierState | None = None) -> None:
        outer = self._outer
        # Set before the launch, because an attempt may be aborted and recorded at once.
        self.made, self.sent = NO_PROGRESS, self.made
        self._events.launches(self.sent)
        outer.launch(self.sent.tokens, earlier)
        trains_on = earlier is None and outer.schedule.delay > 0 and outer.round < self._num_rounds
        if trains_on and not self._events.why_stop(outer.round):
            return
        self._land()
        if not self.is_over and (cause := self._events.why_stop(outer.position.round)):
            self._events.may_save(is_asked=True)
            self.stopped = cause

    def _land(self) -> None:
        self._events.waits()
        number = self._outer.in_flight
        landing = self._outer.land()
        assert number is not None, "there is a round in flight"
        progress = self.sent
        self.sent = NO_PROGRESS
        self._events.landed(number, progress, landing)

    @contextmanager
    def _catching_up(self) -> Iterator[None]:
        """Go on from the state of others if they commit without this island within the block."""
        try:
            yield
        except CaughtUp as caught:
            progress = self.made + self.sent
            self.made = progress if caught.is_kept else NO_PROGRESS
            self.sent = NO_PROGRESS
            self._events.caught_up(caught, progress)
