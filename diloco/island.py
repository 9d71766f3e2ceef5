"""One island's life: join -> (inner steps -> round) x rounds -> leave. Read this first.

Every rank of the island runs `run`, in step with the others. What the parts are and how they are built is in
assemble.py; what happens inside a round is in outer/sync.py. With `outer.delay` a round runs behind the inner steps
that follow it: it is launched at its step and lands some steps later. A run whose rounds wait for a quorum only is
lived at each island's own pace: own_pace.py.
"""

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass

from diloco.assemble import Parts
from diloco.measure import evaluation, step_record
from diloco.metrics import EventRecord, RoundRecord
from inner.trainer import StepResult
from outer.reports import CaughtUp, Landing, RoundReport
from outer.state import Position

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """What an island has done that no committed round has."""

    steps: int = 0
    tokens: int = 0

    def __add__(self, other: "Progress") -> "Progress":
        return Progress(self.steps + other.steps, self.tokens + other.tokens)


NOTHING = Progress()


def run(parts: Parts) -> None:
    """Train until the run's last round is committed. Raises TrainingStopped or OuterError when it cannot go on."""
    outer, rounds = parts.outer, parts.config.outer.num_rounds
    enter(parts, outer.begin())
    evaluate(parts)
    life = Life(parts)
    while outer.position.round < rounds:
        try:
            if outer.round < rounds:
                life.inner_steps()
                life.launch()
            if parts.config.outer.delay == 0 or outer.round == rounds:
                life.land()
        except CaughtUp as caught:
            life.go_on(caught)
    outer.finish()
    parts.event("left", f"the run's {parts.config.outer.rounds} rounds are done")


class Life:
    """The island's progress since the last round that it sent, and what it sent with the one on its way."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.made = self.sent = NOTHING

    def inner_steps(self) -> None:
        """Train until the round's inner steps are done, or until going on would be in vain."""
        parts, outer, trainer = self.parts, self.parts.outer, self.parts.trainer
        # Learning-rate schedule and data position follow from the round, however many steps the last one had here.
        trainer.inner_step = begin = outer.schedule.begin(outer.round)
        last = begin + outer.inner_steps()
        while True:
            result = train(parts)
            self.made += Progress(1, 0 if result.is_skipped else result.tokens)
            left = last - trainer.inner_step
            cause = outer.interruption(left)
            is_over = left <= 0 or cause
            if outer.in_flight is not None and (is_over or trainer.inner_step - begin >= outer.schedule.delay):
                self.land()
            if is_over:
                return

    def launch(self) -> None:
        """Send the round on its way."""
        self.parts.outer.launch(self.made.tokens)
        self.made, self.sent = NOTHING, self.made

    def land(self) -> None:
        """Wait for the round on its way; it commits everywhere, or CaughtUp or OuterError is raised."""
        parts, outer = self.parts, self.parts.outer
        landing = outer.land()
        for report in landing.reports:
            record_round(parts, report, self.sent, landing)
        self.sent = NOTHING
        cycle, rest = divmod(outer.position.round, parts.config.outer.fragments)
        is_last = outer.position.round == parts.config.outer.num_rounds
        if rest == 0 and (is_last or cycle % parts.config.evaluate.every_rounds == 0):
            evaluate(parts)

    def go_on(self, caught: CaughtUp) -> None:
        """Others have committed without this island: it has their state now, and goes on from there."""
        progress = self.made + self.sent
        self.made, self.sent = progress if caught.is_kept else NOTHING, NOTHING
        fate = "kept" if caught.is_kept else "dropped"
        self.parts.event("caught up", f"{caught}; {progress.steps} inner steps {fate}")
        enter(self.parts, self.parts.outer.position)


def enter(parts: Parts, position: Position) -> None:
    """Say where this island stands, after the state of others or the beginning."""
    parts.event("joined", f"round {position.round}, {position.tokens} tokens, digest {parts.outer.digest[:12]}")


def train(parts: Parts, data_step: int | None = None) -> StepResult:
    """One inner step, measured and recorded; `data_step`: which of the data's, None: the schedule's."""
    trainer = parts.trainer
    step = trainer.inner_step if data_step is None else data_step
    batches = parts.batches.micro_batches(step, trainer.data_rank, trainer.num_data_ranks, trainer.settings.micro_batch)
    started = time.monotonic()
    result = trainer.step(batches)
    parts.slow_down(time.monotonic() - started)
    parts.profiler.step()
    parts.outer.pace.observe_step(time.monotonic() - started)
    record_step(parts, result)
    return result


def evaluate(parts: Parts, cycle: int | None = None) -> None:
    """Held-out loss of the global params, recorded for a cycle; None: for that of the round.

    In plain rounds local params are equal to global params at this point.
    """
    position, outer = parts.outer.position, parts.config.outer
    with nullcontext() if outer.is_plain else parts.outer.global_params():
        cycle = position.round // outer.fragments if cycle is None else cycle
        record = evaluation(parts.config, parts.trainer, parts.corpus, cycle, position.tokens)
    if parts.metrics is not None:
        parts.metrics.evaluation(record)
        log.info("round %d: held-out loss %.4f, %.4f bits per byte", record.round, record.loss, record.bits_per_byte)


def record_step(parts: Parts, result: StepResult) -> None:
    """One line in metrics.jsonl, on the island's leader."""
    if parts.metrics is None or parts.speed is None:
        return
    parts.tokens += 0 if result.is_skipped else result.tokens
    parts.metrics.step(step_record(result, parts.tokens, parts.speed))


def record_round(parts: Parts, report: RoundReport, progress: Progress, landing: Landing) -> None:
    """One line in metrics.jsonl; being alone is said loudly, it is what a broken network looks like."""
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
            steps=progress.steps,
            tokens=progress.tokens,
            stalled_seconds=landing.waited_seconds if report.is_committed else 0.0,
            gated=report.gated,
            listeners=tuple(report.listeners),
        )
    )
    for peer, kind, text, count in parts.network.refusals.drain():
        parts.metrics.event(EventRecord(name="refused", text=f"{peer}: {kind}: {text} ({count} times)"))
    state = "committed" if report.is_committed else f"aborted ({report.cause})"
    log.info("round %d attempt %d: %s with %s", report.round, report.attempt, state, ", ".join(report.participants))
    if report.is_committed and len(report.participants) == 1:
        log.warning("round %d: this island is ALONE in the run", report.round)
        parts.metrics.event(EventRecord(name="alone", text=f"round {report.round} was committed by this island alone"))
