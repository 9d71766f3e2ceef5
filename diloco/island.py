"""The loop of one island: enter the run -> (inner steps -> round) x rounds -> leave. Read this first.

Every rank of the island runs `run`, in step with the others. assemble.py builds what it works with, outer/loop.py
describes a round. With `outer.delay` a round runs in the background of the inner steps that follow it: it is launched
at its step and lands some steps later. When rounds wait for a quorum only, island_quorum.py runs instead; train.py
chooses.
"""

import logging
import time
from contextlib import nullcontext
from dataclasses import replace

from diloco.assemble import Runtime
from diloco.records.metrics import EventRecord
from diloco.runtime.garbage import collect_garbage
from diloco.runtime.progress import NO_PROGRESS, Progress, ResumedState, ResumePoint
from diloco.runtime.step_records import evaluate_heldout, make_step_record
from inner.data.batches import StepBatch
from inner.trainer import StepResult
from outer.leases.ledger import Ledger
from outer.report import CaughtUp, Landing
from outer.state.part_state import Position

log = logging.getLogger(__name__)


def run(runtime: Runtime) -> None:
    """Train until the run's last round is committed. Raises TrainingStopped or OuterError when it cannot go on."""
    outer, rounds = runtime.outer, runtime.config.outer.num_rounds
    runtime.activity.start_untimed("entering the run")
    resumed = resume(runtime)
    loop = IslandLoop(runtime, has_saved=resumed is not None)
    outer.begin()
    record_entry(runtime, outer.position)
    if resumed is not None and (resumed.round, resumed.digest) == (outer.position.round, outer.digest):
        loop.resume(resumed.point)
    else:
        count_moments(runtime)
        evaluate(runtime)
    while outer.position.round < rounds:
        try:
            if outer.round < rounds:
                loop.inner_steps()
                loop.launch()
            if runtime.config.outer.delay == 0 or outer.round == rounds or runtime.requests.poll(outer.round).stop:
                loop.land()
                if outer.position.round < rounds and (cause := runtime.requests.poll(outer.position.round).stop):
                    loop.save()
                    runtime.activity.start_untimed("leaving")
                    outer.leave()
                    runtime.event("left", f"{cause}; {outer.position.round} of the run's {rounds} rounds are done")
                    return
        except CaughtUp as caught:
            loop.go_on(caught)
    runtime.activity.start_untimed("leaving")
    outer.finish()
    if runtime.config.outer.gossip is None:
        record_ledger(runtime)
    runtime.event("left", f"the run's {runtime.config.outer.rounds} rounds are done")


class IslandLoop:
    """The island's progress since the last round that it launched, and the progress in the round in flight."""

    def __init__(self, runtime: Runtime, *, has_saved: bool) -> None:
        self.runtime = runtime
        self.has_saved = has_saved
        """Whether the island has a checkpoint. Without one it saves after its next commit, due or not."""
        self.made = self.sent = NO_PROGRESS
        self.begun_at = 0
        """Number of the round's inner steps that were made before this process started."""

    def resume(self, point: ResumePoint) -> None:
        """Go on in the middle of a round."""
        self.made, self.begun_at = point.made, point.steps

    def inner_steps(self) -> None:
        """Train until the round's inner steps are done, or until more steps would be wasted."""
        runtime, outer, trainer = self.runtime, self.runtime.outer, self.runtime.trainer
        if outer.cursor.num_left == 0 and outer.in_flight is not None:
            self.land()  # Only a commit gives this island more data.
        # The learning-rate schedule follows from the round, however many steps the last round had here.
        begin = outer.schedule.begin(outer.round)
        trainer.inner_step = begin + self.begun_at
        last = begin + outer.inner_steps()
        self.begun_at = 0
        while outer.cursor.num_left > 0:
            result = train(runtime)
            self.made += Progress(1, 0 if result.is_skipped else result.tokens)
            left = last - trainer.inner_step
            cause = outer.interruption(left)
            is_over = left <= 0 or cause or outer.cursor.num_left == 0
            if outer.in_flight is not None and (is_over or trainer.inner_step - begin >= outer.schedule.delay):
                self.land()
            if outer.in_flight is None and runtime.requests.poll(outer.round).save:
                self.save()
            if is_over:
                return

    def launch(self) -> None:
        """Start the round."""
        self.runtime.activity.start_untimed("a round")
        # Before the launch, because an attempt may be aborted and recorded at once.
        self.made, self.sent = NO_PROGRESS, self.made
        self.runtime.rounds.contribution = self.sent
        self.runtime.outer.launch(self.sent.tokens)

    def land(self) -> None:
        """Wait for the commit of the round in flight, then evaluate and save if that is due.

        Raises CaughtUp or OuterError when the round does not commit with this island.
        """
        runtime, outer = self.runtime, self.runtime.outer
        runtime.activity.start_untimed("a round")
        landed, landing = outer.in_flight, outer.land()
        count_moments(runtime, landed)
        record_round(runtime, self.sent, landing, outer.position.ledger)
        self.sent = NO_PROGRESS
        cycle, rest = divmod(outer.position.round, runtime.config.outer.fragments)
        is_last = outer.position.round == runtime.config.outer.num_rounds
        if rest == 0 and (is_last or cycle % runtime.config.evaluate.every_rounds == 0):
            evaluate(runtime)
        every = runtime.island.checkpoint.every_rounds
        if every is not None and (not self.has_saved or (rest == 0 and (is_last or cycle % every == 0))):
            self.save()

    def save(self) -> None:
        """Save a checkpoint. No round may be in flight. Training goes on if it fails."""
        outer = self.runtime.outer
        steps = max(self.runtime.trainer.inner_step - outer.schedule.begin(outer.round), 0)
        self.has_saved = True
        save(self.runtime, ResumePoint(steps, self.made))

    def go_on(self, caught: CaughtUp) -> None:
        """Go on from the state of others, who have committed without this island."""
        progress = self.made + self.sent
        self.made, self.sent = progress if caught.is_kept else NO_PROGRESS, NO_PROGRESS
        fate = "kept" if caught.is_kept else "dropped"
        self.runtime.event("caught up", f"{caught}; {progress.steps} inner steps {fate}")
        record_entry(self.runtime, self.runtime.outer.position)
        if not caught.is_kept:
            count_moments(self.runtime)


def train(runtime: Runtime) -> StepResult:
    """Make one inner step, measure and record it. Its seconds include the wait for a turn to compute."""
    runtime.activity.start("inner step")
    trainer = runtime.trainer
    unit = runtime.outer.cursor.next_unit()
    batch = runtime.batches.read_step(unit, trainer.data_rank, trainer.num_data_ranks, trainer.settings.micro_batch)
    started = time.monotonic()
    with runtime.turns:
        result = trainer.step(batch.micro_batches)
    result = replace(result, seconds=time.monotonic() - started)
    runtime.slow_down(result.seconds)
    runtime.profiler.step()
    runtime.outer.pace.observe_step(time.monotonic() - started)
    record_step(runtime, result, batch)
    collect_garbage(result.step)
    return result


def evaluate(runtime: Runtime, cycle: int | None = None) -> None:
    """Evaluate the global params on held-out text and record the loss for a cycle, by default that of the round."""
    position, outer = runtime.outer.position, runtime.config.outer
    runtime.activity.start("evaluation")
    # In plain rounds the local params are equal to the global params at this point.
    with nullcontext() if outer.is_plain else runtime.outer.global_params(), runtime.turns:
        cycle = position.round // outer.fragments if cycle is None else cycle
        record = evaluate_heldout(runtime.config, runtime.trainer, runtime.corpus, cycle, position.tokens)
    if runtime.metrics is not None:
        runtime.metrics.write(record)
        log.info("round %d: held-out loss %.4f, %.4f bits per byte", record.round, record.loss, record.bits_per_byte)


def count_moments(runtime: Runtime, landed: int | None = None) -> None:
    """Correct the bias of averaged moments for the steps behind them: of the landed round, or (None) a taken state."""
    if runtime.moments is not None:
        runtime.moments.set_steps(runtime.outer.moment_steps(landed))


def save(runtime: Runtime, point: ResumePoint) -> None:
    """Save a checkpoint if the island has somewhere to save, and mark the operator's request as fulfilled."""
    runtime.requests.mark_saved()
    if runtime.checkpoints is None:
        return
    runtime.activity.start("a checkpoint")
    problem = runtime.checkpoints.save(point, runtime.tokens)
    if problem is not None:
        runtime.event("not saved", f"{problem}; training goes on")


def resume(runtime: Runtime) -> ResumedState | None:
    """Load the island's newest checkpoint, if there is one and the config allows it."""
    if runtime.checkpoints is None or runtime.island.checkpoint.resume == "never":
        return None
    resumed = runtime.checkpoints.resume()
    if resumed is not None:
        runtime.tokens = resumed.tokens
        changed = f"; changed since: {'; '.join(resumed.changed)}" if resumed.changed else ""
        runtime.event("resumed", f"inner step {resumed.inner_step}, round {resumed.round}{changed}")
    return resumed


def record_entry(runtime: Runtime, position: Position) -> None:
    """Record the position from which the island starts, or goes on after taking the state of others."""
    digest = runtime.outer.digest[:12]
    runtime.event("joined", f"round {position.round}, {position.tokens} tokens, digest {digest}")


def record_ledger(runtime: Runtime) -> None:
    """Record at the end how much of the text the run has trained on."""
    text = runtime.outer.position.ledger
    runtime.event("account", f"{text.trained} units of text trained; {text.open} leased or returned, not trained")


def record_step(runtime: Runtime, result: StepResult, batch: StepBatch) -> None:
    """Write one line to metrics.jsonl. Leader only."""
    if runtime.metrics is None or runtime.speed is None:
        return
    runtime.tokens += 0 if result.is_skipped else result.tokens
    runtime.metrics.write(make_step_record(result, runtime.tokens, runtime.speed, batch))


def record_round(runtime: Runtime, progress: Progress, landing: Landing, ledger: Ledger) -> None:
    """Write one line to metrics.jsonl for the attempt that committed, and lines for what peers were refused."""
    runtime.rounds.write(landing.reports[-1], progress, landing.waited_seconds, ledger)
    if runtime.metrics is None:
        return
    for peer, kind, text, count in runtime.network.rejections.drain():
        runtime.metrics.write(EventRecord(name="refused", text=f"{peer}: {kind}: {text} ({count} times)"))
