"""The loop of one island when rounds wait for a quorum only (`outer.wait_for: quorum`).

    (inner step, land what was committed) x own inner steps -> contribute, wait for the round -> ... until the tokens
    are done

Every rank runs it, in step with the others. Islands contribute different numbers of times, so the position of the run
follows from the committed tokens, not from rounds: a cycle is over when as many tokens are committed as all islands
that begin train on in `outer.inner_steps` steps. Requests are polled and checkpoints saved right after the island has
contributed, because no round that others could commit is being prepared then.
"""

from dataclasses import replace

from diloco.assemble import Runtime
from diloco.config.schema import RunConfig
from diloco.island import evaluate, record_entry, record_ledger, record_round, resume, save, train
from diloco.runtime.progress import NO_PROGRESS, Progress, ResumePoint
from outer.loop import build_quorum_rounds
from outer.report import CaughtUp
from outer.rounds.quorum import CommittedRound, QuorumRounds


def run(runtime: Runtime) -> None:
    """Train until the run's tokens are committed. Raises TrainingStopped or OuterError when it cannot go on."""
    outer = runtime.outer
    runtime.activity.start_untimed("entering the run")
    resumed = resume(runtime)
    outer.begin()
    record_entry(runtime, outer.position)
    rounds = build_quorum_rounds(outer, runtime.config.total_tokens)
    loop = QuorumIslandLoop(runtime, rounds, has_saved=resumed is not None)
    if resumed is not None and (resumed.round, resumed.digest) == (outer.position.round, outer.digest):
        loop.resume(resumed.point.made)
    else:
        evaluate(runtime, loop.cycle)
    rounds.start()
    while not rounds.is_over:
        try:
            loop.turn()
        except CaughtUp as caught:
            loop.go_on(caught)
        if loop.stop and not rounds.is_over:
            runtime.activity.start_untimed("leaving")
            outer.leave()
            runtime.event("left", f"{loop.stop}; {rounds.position.tokens} of the run's tokens are committed")
            return
    if runtime.island.checkpoint.every_rounds is not None:
        loop.save()
    runtime.activity.start_untimed("leaving")
    outer.finish()
    record_ledger(runtime)
    runtime.event("left", f"the run's {runtime.config.outer.rounds} rounds' tokens are committed")


def count_inner_steps(config: RunConfig, tokens: int) -> int:
    """Inner steps of the run behind so many committed tokens, if all islands that begin had made equally many."""
    return tokens // (config.optimizer.tokens_per_step * config.outer.start_islands)


class QuorumIslandLoop:
    """The island's progress since it last contributed, and the run's position then."""

    def __init__(self, runtime: Runtime, rounds: QuorumRounds, *, has_saved: bool) -> None:
        self.runtime, self.rounds = runtime, rounds
        self.has_saved = has_saved
        """Whether the island has a checkpoint. Without one it saves after its next contribution, due or not."""
        self.made = NO_PROGRESS
        self.cycle = self.saved_cycle = self._inner_step // runtime.config.outer.inner_steps
        """Cycles of the last round that has landed, and of the last checkpoint that was due."""
        self.stop = ""
        """Why the island leaves now, or ""."""

    def resume(self, made: Progress) -> None:
        """Go on with the progress that a checkpoint held."""
        self.made = made
        self.rounds.begin_progress(made.steps)

    def turn(self) -> None:
        """Make one inner step and land what was committed; if that is due, contribute to a round and wait for it."""
        # Only a commit gives this island more data.
        if self.rounds.is_due() or self.runtime.outer.cursor.num_left == 0:
            self.runtime.activity.start_untimed("a round")
            self.runtime.rounds.contribution = self.made
            try:
                committed = self.rounds.contribute(self.made.tokens, holds=True)
            finally:
                self.runtime.rounds.contribution = NO_PROGRESS
            self.land(committed)
            return
        self.runtime.trainer.inner_step = self._inner_step + self.made.steps
        result = train(self.runtime)
        self.made += Progress(1, 0 if result.is_skipped else result.tokens)
        for committed in self.rounds.land(self.made.tokens):
            self.land(committed)

    def land(self, committed: CommittedRound) -> None:
        """Record a committed round; save and evaluate when that is due."""
        given = self.made if committed.is_given else NO_PROGRESS
        # A plan may take long while the island trains; only the time that training stood still counts as a wait.
        landing, report = committed.landing, committed.landing.reports[-1]
        stood = max(landing.waited_seconds - report.reduce_seconds, 0.0)
        report = replace(report, wait_seconds=min(report.wait_seconds, stood))
        record_round(self.runtime, given, replace(landing, reports=[report]), committed.position.ledger)
        if committed.is_dropped:
            self.runtime.event("dropped", f"{self.made.steps} inner steps: others have been given their text")
        if committed.is_given or committed.is_dropped:
            self.made = NO_PROGRESS
        config, before = self.runtime.config, self.cycle
        last = config.outer.rounds
        self.cycle = min(count_inner_steps(config, committed.position.tokens) // config.outer.inner_steps, last)
        if committed.is_given:
            self._fulfil_requests(committed.position.round)
        if is_cycle_over(before, self.cycle, config.evaluate.every_rounds, last):
            evaluate(self.runtime, self.cycle)

    def save(self) -> None:
        """Save a checkpoint, while no round is being prepared. Training goes on if it fails."""
        assert self.rounds.is_quiet, "what a round in flight will commit is not known yet"
        self.saved_cycle, self.has_saved = self.cycle, True
        self.runtime.trainer.inner_step = self._inner_step + self.made.steps
        save(self.runtime, ResumePoint(self.made.steps, self.made))

    def go_on(self, caught: CaughtUp) -> None:
        """Go on from the state of others, who have committed without this island."""
        progress, self.made = self.made, self.made if caught.is_kept else NO_PROGRESS
        fate = "kept" if caught.is_kept else "dropped"
        self.runtime.event("caught up", f"{caught}; {progress.steps} inner steps {fate}")
        record_entry(self.runtime, self.rounds.position)

    def _fulfil_requests(self, num_rounds: int) -> None:
        """Save and leave as is due or as the operator asks, after a round that this island contributed to."""
        runtime, every = self.runtime, self.runtime.island.checkpoint.every_rounds
        request = runtime.requests.poll(num_rounds)
        self.stop = request.stop
        is_due = every is not None and (not self.has_saved or self.cycle // every > self.saved_cycle // every)
        if (request.save or request.stop or is_due) and not self.rounds.is_over:
            self.save()
        if not request.stop:
            self.rounds.go_on()

    @property
    def _inner_step(self) -> int:
        return count_inner_steps(self.runtime.config, self.rounds.position.tokens)


def is_cycle_over(before: int, cycle: int, every: int, last: int) -> bool:
    """Whether going from cycle `before` to `cycle` ends a cycle that is a multiple of `every`, or the last one."""
    return cycle > before and (cycle // every > before // every or cycle == last)
