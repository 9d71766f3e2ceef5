"""The loop of one island if rounds wait for a quorum only (`outer.wait_for: quorum`).

island.py is the loop of all other runs. Every rank runs it, in step with the others.
island_rounds/of_quorum.py decides when the island contributes. Right after a contribution, requests
are polled and checkpoints are saved.
"""

from dataclasses import replace

from diloco.assemble import Runtime
from diloco.island import await_round, evaluate, resume, save, train
from diloco.island_records import record_round
from diloco.island_rounds.of_quorum import QuorumIslandRounds
from diloco.runtime.progress import NO_PROGRESS, Progress
from outer.report import CaughtUp, Landing
from outer.rounds.quorum import CommittedRound


def run(runtime: Runtime) -> None:
    """Train until the run's tokens are committed. Raises TrainingStopped or OuterError when it cannot go on."""
    outer = runtime.outer
    runtime.activity.start_untimed("entering the run")
    resumed = resume(runtime)
    outer.begin()
    runtime.participation.record_entry(outer.position)
    duties = QuorumDuties(runtime, has_saved=resumed is not None)
    rounds = duties.rounds
    if resumed is not None and (resumed.round, resumed.digest) == (outer.position.round, outer.digest):
        rounds.resume(resumed.point)
    else:
        evaluate(runtime, duties.cycle)
    rounds.proceed()
    while not rounds.is_over:
        result = train(runtime)
        rounds.step(0 if result.is_skipped else result.tokens)
    if cause := rounds.stopped:
        runtime.activity.start_untimed("leaving")
        outer.leave()
        runtime.event("left", f"{cause}; {rounds.rounds.position.tokens} of the run's tokens are committed")
        return
    if runtime.island.checkpoint.every_rounds is not None:
        duties.save()
    runtime.activity.start_untimed("leaving")
    outer.finish()
    runtime.participation.record_ledger()
    runtime.event("left", f"the run's {runtime.config.outer.rounds} rounds' tokens are committed")


class QuorumDuties:
    """What an island does around its rounds. Implements QuorumEvents.

    It sets the step of the learning-rate schedule, records, evaluates and saves.
    """

    def __init__(self, runtime: Runtime, *, has_saved: bool) -> None:
        self.runtime = runtime
        self.rounds = QuorumIslandRounds(runtime.outer, runtime.config, self)
        self.has_saved = has_saved
        """Whether the island has a checkpoint. Without one it saves after its next contribution, due or not."""
        self.cycle = self.saved_cycle = self.rounds.cycle
        """The cycle of the last landed round, and the cycle of the last checkpoint that was due."""
        self._is_evaluation_due = False

    def begins(self, inner_step: int) -> None:
        self.runtime.trainer.inner_step = inner_step

    def launches(self, progress: Progress) -> None:
        await_round(self.runtime)
        self.runtime.participation.rounds.contribution = progress

    def landed(self, committed: CommittedRound, made: Progress, cycle: int) -> None:
        runtime = self.runtime
        before = self.cycle
        runtime.participation.rounds.contribution = NO_PROGRESS
        given = made if committed.is_given else NO_PROGRESS
        record_round(runtime, given, standing(committed.landing), committed.position.ledger)
        if committed.is_dropped:
            runtime.participation.record_dropped(made)
        self.cycle = cycle
        config = runtime.config
        self._is_evaluation_due = is_cycle_over(before, cycle, config.evaluate.every_rounds, config.outer.rounds)
        if not committed.is_given:
            self._evaluate_if_due()

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        participation = self.runtime.participation
        participation.rounds.contribution = NO_PROGRESS
        participation.record_catch_up(caught, progress, self.rounds.rounds.position)

    def contributed(self, num_rounds: int) -> str:
        """Save if that is due or the operator requests it.

        Return why the island should leave, or "".
        """
        every = self.runtime.island.checkpoint.every_rounds
        request = self.runtime.participation.requests.poll(num_rounds)
        is_due = every is not None and (not self.has_saved or self.cycle // every > self.saved_cycle // every)
        if (request.save or request.stop or is_due) and not self.rounds.rounds.is_over:
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
        self.runtime.trainer.inner_step = self.rounds.inner_step
        save(self.runtime, self.rounds.resume_point)

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
