"""The loop of one island: enter the run -> (inner steps -> round) x rounds -> leave. Read this first.

Every rank of the island runs `run`, in step with the others. assemble.py builds what it works with, island_rounds/
says when rounds are launched and land, outer/loop.py describes a round. When rounds wait for a quorum only,
island_quorum.py runs instead; train.py chooses.
"""

import logging
import time
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import replace

from diloco.assemble import Runtime
from diloco.config.schema import stage_in_round
from diloco.island_records import record_round, record_step
from diloco.island_rounds.of_all import IslandRounds
from diloco.records.metrics import SAVING, EvalRecord, PauseRecord
from diloco.runtime.evaluation import evaluate_heldout
from diloco.runtime.garbage import collect_garbage
from diloco.runtime.progress import Progress, ResumedState, ResumePoint
from inner.errors import TrainingStopped
from inner.trainer import StepResult
from outer.report import CaughtUp, Landing
from outer.state.earlier import EarlierState

log = logging.getLogger(__name__)

MOST_OFFERS = 8
"""Most rounds in a row in which an island without a finite loss offers to go back. Then it ends."""
MOST_RETURNS = 3
"""Most times that an island goes back. After that, no earlier state will mend its losses."""


def run(runtime: Runtime) -> None:
    """Train until the run's last round is committed. Raises TrainingStopped or OuterError when it cannot go on."""
    outer = runtime.outer
    num_rounds = runtime.config.outer.num_rounds
    runtime.activity.start_untimed("entering the run")
    resumed = resume(runtime)
    outer.begin()
    runtime.participation.record_entry(outer.position)
    runtime.enter_stage(stage_in_round(runtime.config, outer.round))
    duties = IslandDuties(runtime, num_rounds, has_saved=resumed is not None)
    if resumed is not None and (resumed.round, resumed.digest) == (outer.position.round, outer.digest):
        duties.rounds.resume(resumed.point)
    else:
        runtime.participation.count_moments()
        evaluate(runtime)
    train_rounds(runtime, duties)
    runtime.activity.start_untimed("leaving")
    if cause := duties.rounds.stopped:
        outer.leave()
        runtime.event("left", f"{cause}; {outer.position.round} of the run's {num_rounds} rounds are done")
        return
    outer.finish()
    if runtime.config.outer.gossip is None:
        runtime.participation.record_ledger()
    runtime.event("left", f"the run's {runtime.config.outer.rounds} rounds are done")


def train_rounds(runtime: Runtime, duties: "IslandDuties") -> None:
    """Make inner steps until the run is over or the island leaves."""
    rounds = duties.rounds
    rounds.proceed()
    while not rounds.is_over:
        try:
            result = train(runtime)
        except TrainingStopped as stopped:
            earlier = duties.find_earlier(stopped)
            if earlier is None:
                raise
            rounds.go_back(earlier)
            continue
        if result.spike is not None and result.spike.action == "rewind":
            runtime.outer.rewind()
        rounds.step(0 if result.is_skipped else result.tokens)


class IslandDuties:
    """What an island does around its rounds. Implements RoundEvents.

    It sets the step of the learning-rate schedule, records, evaluates and saves.
    """

    def __init__(self, runtime: Runtime, num_rounds: int, *, has_saved: bool) -> None:
        self.runtime = runtime
        self.rounds = IslandRounds(runtime.outer, num_rounds, self)
        self.has_saved = has_saved
        """Whether the island has a checkpoint. Without one it saves after its next commit, due or not."""
        self.num_offers = 0
        """Rounds since the last finite loss in which this island tried to go back."""
        self.num_returns = 0
        """How often it has gone back to an earlier state."""

    def begins(self, inner_step: int) -> None:
        self.runtime.trainer.inner_step = inner_step
        self.runtime.enter_stage(stage_in_round(self.runtime.config, self.runtime.outer.round))

    def launches(self, progress: Progress) -> None:
        await_round(self.runtime)
        self.runtime.participation.rounds.contribution = progress

    def waits(self) -> None:
        await_round(self.runtime)

    def landed(self, number: int, progress: Progress, landing: Landing) -> None:
        runtime = self.runtime
        outer = self.runtime.outer
        if landing.reports[-1].earlier is not None:
            self.went_back(landing.reports[-1].earlier)
        else:
            runtime.participation.count_moments(number)
        if runtime.trainer.broken_since is None:
            self.num_offers = 0
        record_round(runtime, progress, landing, outer.position.ledger)
        cycle, rest = divmod(outer.position.round, runtime.config.outer.fragments)
        is_last = outer.position.round == runtime.config.outer.num_rounds
        if rest == 0 and (is_last or cycle % runtime.config.evaluate.every_rounds == 0):
            evaluate(runtime)
        every = runtime.island.checkpoint.every_rounds
        if every is not None and (not self.has_saved or (rest == 0 and (is_last or cycle % every == 0))):
            self.may_save(is_asked=True)

    def find_earlier(self, stopped: TrainingStopped) -> EarlierState | None:
        """Return the state to go back to, because the losses do not become finite.

        None: the island must end.
        """
        runtime = self.runtime
        self.num_offers += 1
        if runtime.checkpoints is None or self.num_offers > MOST_OFFERS or self.num_returns >= MOST_RETURNS:
            return None
        earlier = runtime.checkpoints.find_earlier()
        if earlier is not None:
            runtime.event("offers to go back", f"to round {earlier.round}, because of {stopped}")
        return earlier

    def went_back(self, round_number: int) -> None:
        """Train on from the checkpoint of this round, to which all islands have gone back together."""
        runtime = self.runtime
        assert runtime.checkpoints is not None, "only an island with a checkpoint offers to go back to it"
        inner_step = runtime.trainer.inner_step
        runtime.checkpoints.reload_trainer()
        runtime.trainer.go_on_after_broken_steps(inner_step)
        runtime.outer.rewind()
        runtime.participation.count_moments()
        self.num_returns += 1
        runtime.event("went back", f"to the state of round {round_number}; text read since then is not read again")

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        self.runtime.participation.record_catch_up(caught, progress, self.runtime.outer.position)

    def may_save(self, *, is_asked: bool) -> None:
        """Save a checkpoint if `is_asked` or if the operator requests it.

        Training goes on if that fails.
        """
        if is_asked or self.runtime.participation.requests.poll(self.runtime.outer.round).save:
            self.has_saved = True
            save(self.runtime, self.rounds.resume_point)

    def why_stop(self, num_rounds: int) -> str:
        return self.runtime.participation.requests.poll(num_rounds).stop


def train(runtime: Runtime) -> StepResult:
    """Make one inner step, measure and record it. Its seconds include the wait for a turn to compute."""
    if runtime.batches.is_streamed:
        # Waiting for streamed text has deadlines of its own.
        runtime.activity.start_untimed("reading text")
        runtime.batches.expect(runtime.outer.cursor.coming)
    else:
        runtime.activity.start("inner step")
    runtime.times.begin()
    trainer = runtime.trainer
    number = runtime.outer.cursor.num_own
    unit = runtime.outer.cursor.next_unit()
    batch = runtime.batches.read_step(
        unit, trainer.data_rank, trainer.num_data_ranks, trainer.settings.micro_batch, number
    )
    if runtime.batches.is_streamed:
        runtime.activity.start("inner step")
    started = time.monotonic()
    try:
        with runtime.turns, runtime.traffic.counting():
            result = trainer.step(batch.micro_batches)
    except TrainingStopped:
        reject_checkpoints(runtime)
        raise
    result = replace(result, seconds=time.monotonic() - started)
    runtime.times.end(batch.seconds)
    runtime.slow_down(result.seconds)
    runtime.profiler.step()
    runtime.outer.pace.observe_step(time.monotonic() - started)
    record_step(runtime, result, batch)
    collect_garbage(result.step)
    return result


def await_round(runtime: Runtime) -> None:
    """Note that the training thread waits for a round, with no limit while it shows signs of life."""
    if runtime.metrics is None:
        runtime.activity.start_untimed("a round")  # Other ranks wait for the leader, whose watchdog ends them, too.
    else:
        runtime.activity.start_beating("a round", runtime.outer.pace.deadlines.limit("reduce"))


def evaluate(runtime: Runtime, cycle: int | None = None) -> None:
    """Evaluate the global params on held-out text, and record the loss for a cycle.

    By default that is the cycle of the current round.
    """
    position = runtime.outer.position
    outer = runtime.config.outer
    cycle = position.round // outer.fragments if cycle is None else cycle

    def evaluate_here() -> EvalRecord:
        # In plain rounds the local params are equal to the global params at this point.
        with nullcontext() if outer.is_plain else runtime.outer.global_params(), runtime.turns:
            return evaluate_heldout(runtime.stage_config, runtime.trainer, runtime.corpus, cycle, position.tokens)

    runtime.activity.start("evaluation")
    began = time.monotonic()
    shared = runtime.evaluations
    record = evaluate_here() if shared is None else shared.find(evaluation_key(runtime, cycle), evaluate_here)
    if runtime.metrics is not None:
        runtime.metrics.write(replace(record, seconds=time.monotonic() - began))
        log.info("round %d: held-out loss %.4f, %.4f bits per byte", record.round, record.loss, record.bits_per_byte)


def evaluation_key(runtime: Runtime, cycle: int) -> Hashable:
    """Return what a held-out loss depends on: the state's digest, the text, and the computation."""
    texts = tuple(text.name for text in runtime.corpus.texts)
    computes = runtime.trainer.settings, runtime.island.parallel.model_dump_json()
    return cycle, runtime.outer.digest, texts, runtime.stage, computes


def save(runtime: Runtime, point: ResumePoint) -> None:
    """Save a checkpoint if the island has a place for it; mark the operator's request as done."""
    runtime.participation.requests.mark_saved()
    if runtime.checkpoints is None:
        return
    if (since := runtime.trainer.broken_since) is not None:
        runtime.event("not saved", f"no loss has been finite since inner step {since}; earlier checkpoints are kept")
        return
    runtime.activity.start("a checkpoint")
    began = time.monotonic()
    problem = runtime.checkpoints.save(point, runtime.tokens)
    if runtime.metrics is not None:
        runtime.metrics.write(PauseRecord(name=SAVING, seconds=time.monotonic() - began))
    if problem is not None:
        runtime.event("not saved", f"{problem}; training goes on")


def reject_checkpoints(runtime: Runtime) -> None:
    """Reject the checkpoints since the losses broke: the island then goes on from an earlier one."""
    since = runtime.trainer.broken_since
    if runtime.checkpoints is None or since is None:
        return
    if names := runtime.checkpoints.reject_since(since):
        text = f"{', '.join(names)}: no loss has been finite since inner step {since}"
        runtime.event("rejected", f"{text}; the island goes on from an earlier checkpoint")


def resume(runtime: Runtime) -> ResumedState | None:
    """Load the island's newest checkpoint, if there is one and the config allows it."""
    if runtime.checkpoints is None or runtime.island.checkpoint.resume == "never":
        return None
    resumed = runtime.checkpoints.resume()
    if resumed is not None:
        runtime.tokens = resumed.tokens
        changed = f"; changed since: {'; '.join(resumed.changed)}" if resumed.changed else ""
        runtime.event("resumed", f"inner step {resumed.inner_step}, round {resumed.round}{changed}")
        if resumed.changed and runtime.metrics is not None:
            log.warning("the run goes on with other settings than it was saved with%s", changed)
    return resumed
