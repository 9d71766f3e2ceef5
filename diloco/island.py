"""One island's life: join -> (inner steps -> round) x rounds -> leave. Read this first.

Every rank of the island runs `run`, in step with the others. What the parts are and how they are built is in
assemble.py; what happens inside a round is in outer/sync.py. With `outer.delay` a round runs behind the inner steps
that follow it: it is launched at its step and lands some steps later. A run whose rounds wait for a quorum only is
lived at each island's own pace: own_pace.py.
"""

import logging
import time
from contextlib import nullcontext

from diloco.assemble import Parts
from diloco.measure import ReadUnit, evaluation, read_unit, step_record
from diloco.metrics import EventRecord, RoundRecord
from diloco.progress import NOTHING, Place, Progress, Resumed
from inner.trainer import StepResult
from outer.account import Account
from outer.reports import CaughtUp, Landing, RoundReport
from outer.runs import triple
from outer.state import Position

log = logging.getLogger(__name__)


def run(parts: Parts) -> None:
    """Train until the run's last round is committed. Raises TrainingStopped or OuterError when it cannot go on."""
    outer, rounds = parts.outer, parts.config.outer.num_rounds
    parts.heartbeat.rest("entering the run")
    life = Life(parts)
    resumed = resume(parts)
    enter(parts, outer.begin())
    if resumed is not None and (resumed.round, resumed.digest) == (outer.position.round, outer.digest):
        life.take_up(resumed.place)
    else:
        count_moments(parts)
        evaluate(parts)
    while outer.position.round < rounds:
        try:
            if outer.round < rounds:
                life.inner_steps()
                life.launch()
            if parts.config.outer.delay == 0 or outer.round == rounds or parts.wishes.next(outer.round).stop:
                life.land()
                if outer.position.round < rounds and (cause := parts.wishes.next(outer.position.round).stop):
                    life.save()
                    parts.heartbeat.rest("leaving")
                    outer.leave()
                    parts.event("left", f"{cause}; {outer.position.round} of the run's {rounds} rounds are done")
                    return
        except CaughtUp as caught:
            life.go_on(caught)
    parts.heartbeat.rest("leaving")
    outer.finish()
    if parts.config.outer.gossip is None:
        tell_account(parts)
    parts.event("left", f"the run's {parts.config.outer.rounds} rounds are done")


class Life:
    """The island's progress since the last round that it sent, and what it sent with the one on its way."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.made = self.sent = NOTHING
        self.begun_at = 0
        """Inner steps of the round that were made before this process began."""

    def take_up(self, place: Place) -> None:
        """Go on in the middle of a round."""
        self.made, self.begun_at = place.made, place.steps

    def inner_steps(self) -> None:
        """Train until the round's inner steps are done, or until going on would be in vain."""
        parts, outer, trainer = self.parts, self.parts.outer, self.parts.trainer
        if outer.reading.num_left == 0 and outer.in_flight is not None:
            self.land()  # Only a commit gives this island more to read.
        # The learning-rate schedule follows from the round, however many steps the last one had here.
        begin = outer.schedule.begin(outer.round)
        trainer.inner_step = begin + self.begun_at
        last = begin + outer.inner_steps()
        self.begun_at = 0
        while outer.reading.num_left > 0:
            result = train(parts)
            self.made += Progress(1, 0 if result.is_skipped else result.tokens)
            left = last - trainer.inner_step
            cause = outer.interruption(left)
            is_over = left <= 0 or cause or outer.reading.num_left == 0
            if outer.in_flight is not None and (is_over or trainer.inner_step - begin >= outer.schedule.delay):
                self.land()
            if outer.in_flight is None and parts.wishes.next(outer.round).save:
                self.save()
            if is_over:
                return

    def launch(self) -> None:
        """Send the round on its way."""
        self.parts.heartbeat.rest("a round")
        self.parts.outer.launch(self.made.tokens)
        self.made, self.sent = NOTHING, self.made

    def land(self) -> None:
        """Wait for the round on its way; it commits everywhere, or CaughtUp or OuterError is raised."""
        parts, outer = self.parts, self.parts.outer
        parts.heartbeat.rest("a round")
        landed, landing = outer.in_flight, outer.land()
        count_moments(parts, landed)
        for report in landing.reports:
            record_round(parts, report, self.sent, landing, outer.position.account)
        self.sent = NOTHING
        cycle, rest = divmod(outer.position.round, parts.config.outer.fragments)
        is_last = outer.position.round == parts.config.outer.num_rounds
        if rest == 0 and (is_last or cycle % parts.config.evaluate.every_rounds == 0):
            evaluate(parts)
        every = parts.island.checkpoint.every_rounds
        if rest == 0 and every is not None and (is_last or cycle % every == 0):
            self.save()

    def save(self) -> None:
        """A checkpoint of where the island is; no round may be on its way. Training goes on whatever comes of it."""
        outer = self.parts.outer
        steps = max(self.parts.trainer.inner_step - outer.schedule.begin(outer.round), 0)
        save(self.parts, Place(steps, self.made))

    def go_on(self, caught: CaughtUp) -> None:
        """Others have committed without this island: it has their state now, and goes on from there."""
        progress = self.made + self.sent
        self.made, self.sent = progress if caught.is_kept else NOTHING, NOTHING
        fate = "kept" if caught.is_kept else "dropped"
        self.parts.event("caught up", f"{caught}; {progress.steps} inner steps {fate}")
        enter(self.parts, self.parts.outer.position)
        if not caught.is_kept:
            count_moments(self.parts)


def save(parts: Parts, place: Place) -> None:
    """A checkpoint, if the island has somewhere to save; a wish for one is fulfilled either way."""
    parts.wishes.saved()
    if parts.checkpoints is None:
        return
    parts.heartbeat.begin("a checkpoint")
    problem = parts.checkpoints.save(place, parts.tokens)
    if problem is not None:
        parts.event("not saved", f"{problem}; training goes on")


def tell_account(parts: Parts) -> None:
    """How much of the text the run has trained, at its end."""
    text = parts.outer.position.account
    parts.event("account", f"{text.trained} units of text trained; {text.open} leased or returned, not trained")


def resume(parts: Parts) -> Resumed | None:
    """Go on from the island's newest checkpoint, if there is one and it is wanted."""
    if parts.checkpoints is None or parts.island.checkpoint.resume == "never":
        return None
    resumed = parts.checkpoints.resume()
    if resumed is not None:
        parts.tokens = resumed.tokens
        changed = f"; changed since: {'; '.join(resumed.changed)}" if resumed.changed else ""
        parts.event("resumed", f"inner step {resumed.inner_step}, round {resumed.round}{changed}")
    return resumed


def enter(parts: Parts, position: Position) -> None:
    """Say where this island stands, after the state of others or the beginning."""
    parts.event("joined", f"round {position.round}, {position.tokens} tokens, digest {parts.outer.digest[:12]}")


def count_moments(parts: Parts, landed: int | None = None) -> None:
    """Bias correction goes by the steps behind the moments: of the round that landed, or (None) of others' state."""
    if parts.moments is not None:
        parts.moments.set_steps(parts.outer.moment_steps(landed))


def train(parts: Parts) -> StepResult:
    """One inner step, measured and recorded."""
    parts.heartbeat.begin("inner step")
    reading = read_unit(parts.batches, parts.outer.reading.next_unit(), parts.trainer)
    started = time.monotonic()
    result = parts.trainer.step(reading.micro_batches)
    parts.slow_down(time.monotonic() - started)
    parts.profiler.step()
    parts.outer.pace.observe_step(time.monotonic() - started)
    record_step(parts, result, reading)
    return result


def evaluate(parts: Parts, cycle: int | None = None) -> None:
    """Held-out loss of the global params, recorded for a cycle; None: for that of the round.

    In plain rounds local params are equal to global params at this point.
    """
    position, outer = parts.outer.position, parts.config.outer
    parts.heartbeat.begin("evaluation")
    with nullcontext() if outer.is_plain else parts.outer.global_params():
        cycle = position.round // outer.fragments if cycle is None else cycle
        record = evaluation(parts.config, parts.trainer, parts.corpus, cycle, position.tokens)
    if parts.metrics is not None:
        parts.metrics.evaluation(record)
        log.info("round %d: held-out loss %.4f, %.4f bits per byte", record.round, record.loss, record.bits_per_byte)


def record_step(parts: Parts, result: StepResult, reading: ReadUnit) -> None:
    """One line in metrics.jsonl, on the island's leader."""
    if parts.metrics is None or parts.speed is None:
        return
    parts.tokens += 0 if result.is_skipped else result.tokens
    parts.metrics.step(step_record(result, parts.tokens, parts.speed, reading))


def record_round(parts: Parts, report: RoundReport, progress: Progress, landing: Landing, account: Account) -> None:
    """One line in metrics.jsonl; being alone is said loudly, it is what a broken network looks like.

    `account`: of the data, after the landing.
    """
    if parts.metrics is None:
        return
    parts.metrics.round(
        RoundRecord(
            round=report.round,
            attempt=report.attempt,
            participants=tuple(report.participants),
            committed=report.is_committed,
            digest=report.digest,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            reduce_seconds=report.reduce_seconds,
            wait_seconds=report.wait_seconds,
            pseudo_gradient_norm=report.pseudo_grad_norm,
            cause=report.cause or None,
            is_own=report.is_own,
            steps=progress.steps,
            tokens=progress.tokens,
            stalled_seconds=landing.waited_seconds if report.is_committed else 0.0,
            gated=report.gated,
            base=report.base,
            units=[triple(run) for run in report.units],
            trained_units=account.trained,
            open_units=account.open,
            listeners=tuple(report.listeners),
        )
    )
    for peer, kind, text, count in parts.network.refusals.drain():
        parts.metrics.event(EventRecord(name="refused", text=f"{peer}: {kind}: {text} ({count} times)"))
    state = "committed" if report.is_committed else f"aborted ({report.cause})"
    log.info("round %d attempt %d: %s with %s", report.round, report.attempt, state, ", ".join(report.participants))
    if report.is_committed and len(report.participants) == 1:
        log.warning("round %d: this island is ALONE in the %s", report.round, "round" if report.is_own else "run")
        parts.metrics.event(EventRecord(name="alone", text=f"round {report.round} was committed by this island alone"))
