"""What an island does around rounds that wait for a quorum only (`outer.wait_for: quorum`).

Checkpoints are saved right after a contribution, and after the round that ends a cycle to be saved.
That round is the same on all islands, so they have saved the same state and can go back to it
together. Right after a contribution requests are polled.
"""

from dataclasses import replace

from diloco.assemble import Runtime
from diloco.island_duties.actions import await_round, evaluate, save
from diloco.island_duties.going_back import GoingBack
from diloco.island_records import record_round
from diloco.island_rounds.of_quorum import QuorumIslandRounds
from diloco.runtime.progress import NO_PROGRESS, Progress
from outer.leases.ledger import Ledger
from outer.report import CaughtUp, Landing
from outer.rounds.quorum import CommittedRound


class QuorumDuties:
    """Implements `Duties` and `QuorumEvents`."""

    def __init__(self, runtime: Runtime, *, has_saved: bool) -> None:
        self.runtime = runtime
        self._save_every = runtime.island.checkpoint.every_rounds
        self.rounds = QuorumIslandRounds(
            runtime.outer, runtime.config, self, save_every=self._save_every
        )
        self.going_back = GoingBack(runtime)
        self.has_saved = has_saved
        """Whether the island has a checkpoint. Without one it saves after its next contribution,
        due or not.
        """
        self.cycle = self.saved_cycle = self.rounds.cycle
        """The cycle of the last landed round, and the cycle of the last checkpoint that was due."""
        self.first_unproven: int | None = None
        """Inner step of the first checkpoint that no finite loss has followed."""
        self._saved_step: int | None = None
        """Inner step of the first checkpoint since the last inner step."""
        self._is_evaluation_due = False

    @property
    def progress(self) -> str:
        return f"{self.rounds.rounds.position.tokens} of the run's tokens are committed"

    @property
    def result(self) -> str:
        return f"the run's {self.runtime.config.outer.rounds} rounds' tokens are committed"

    def end(self) -> None:
        """Save the last state."""
        if self._save_every is not None:
            self.save()

    def begins(self, inner_step: int, ledger: Ledger) -> None:
        if self.going_back.is_well():
            self.rounds.rounds.withdraw()
            # The inner step that begins now proves these, if its loss is finite.
            self.first_unproven = self._saved_step
            self._saved_step = None
        self.runtime.trainer.inner_step = inner_step
        self.runtime.enter_stage(ledger)

    def launches(self, progress: Progress) -> None:
        await_round(self.runtime)
        self.runtime.participation.rounds.contribution = progress

    def landed(self, committed: CommittedRound, made: Progress, cycle: int) -> None:
        runtime = self.runtime
        before = self.cycle
        runtime.participation.rounds.contribution = NO_PROGRESS
        if committed.earlier is not None:
            self.going_back.go_back(committed.earlier)
        runtime.trainer.lower_loss_scale(committed.landing.reports[-1].loss_scale)
        given = made if committed.is_given else NO_PROGRESS
        record_round(runtime, given, standing(committed.landing), committed.position.ledger)
        if committed.is_dropped:
            runtime.participation.record_dropped(made)
        self.cycle = cycle
        config = runtime.config
        self._is_evaluation_due = is_cycle_over(
            before, cycle, config.evaluate.every_rounds, config.outer.rounds
        )
        if not committed.is_given:
            self._evaluate_if_due()

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        participation = self.runtime.participation
        participation.rounds.contribution = NO_PROGRESS
        participation.record_catch_up(caught, progress, self.rounds.rounds.position)

    def may_save(self) -> None:
        """Save if that is due."""
        if self._is_save_due and not self.rounds.rounds.is_over:
            self.save()

    def contributed(self, num_rounds: int) -> str:
        """Save if that is due or the operator requests it.

        Return why the island should leave, or "".
        """
        request = self.runtime.participation.requests.poll(num_rounds)
        is_first = self._save_every is not None and not self.has_saved
        if (
            request.save or request.stop or is_first or self._is_save_due
        ) and not self.rounds.rounds.is_over:
            self.save()
        if not request.stop:
            # The evaluation takes long, and other islands need not wait for it.
            self.rounds.go_on()
        self._evaluate_if_due()
        return request.stop

    def save(self) -> None:
        """Save a checkpoint, while no round is being prepared. Training goes on if it fails."""
        self.saved_cycle = self.cycle
        self.has_saved = True
        # Committed steps alone, because they never become fewer: newer checkpoints have higher
        # numbers.
        step = self.rounds.committed_steps
        self.runtime.trainer.inner_step = step
        if self._saved_step is None:
            self._saved_step = step
        save(self.runtime, self.rounds.resume_point)

    @property
    def _is_save_due(self) -> bool:
        every = self._save_every
        return every is not None and self.cycle // every > self.saved_cycle // every

    def _evaluate_if_due(self) -> None:
        if self._is_evaluation_due:
            self._is_evaluation_due = False
            evaluate(self.runtime, self.cycle)


def standing(landing: Landing) -> Landing:
    """Return the landing with only the stalled time as its wait.

    The island trains while a plan is waited for, which may take long.
    """
    report = landing.reports[-1]
    stood = max(landing.waited_seconds - report.reduce_seconds, 0.0)
    return replace(landing, reports=[replace(report, wait_seconds=min(report.wait_seconds, stood))])


def is_cycle_over(before: int, cycle: int, every: int, last: int) -> bool:
    """Return whether a cycle ended after `before` that is the last or a multiple of `every`."""
    return cycle > before and (cycle // every > before // every or cycle == last)
