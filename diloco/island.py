"""One island's life: join -> (inner steps -> round) x rounds -> leave. Read this first.

Every rank of the island runs `run`, in step with the others. What the parts are and how they are built is in
assemble.py; what happens inside a round is in outer/sync.py.
"""

import logging
import time
from dataclasses import dataclass

from diloco.assemble import Parts
from diloco.measure import evaluation, step_record
from diloco.metrics import EventRecord, RoundRecord
from inner.trainer import StepResult
from outer.errors import OuterError
from outer.reports import CaughtUp, RoundReport
from outer.state import Position

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 100
"""Aborted attempts at one round before the island gives up."""


@dataclass(frozen=True)
class Progress:
    """What an island has done since the last commit that it was part of."""

    steps: int = 0
    tokens: int = 0


NOTHING = Progress()


def run(parts: Parts) -> None:
    """Train until the run's last round is committed. Raises TrainingStopped or OuterError when it cannot go on."""
    outer, rounds = parts.outer, parts.config.outer.rounds
    enter(parts, outer.begin())
    evaluate(parts)
    carried = NOTHING
    while outer.position.round < rounds:
        progress = inner_steps(parts, carried)
        try:
            commit(parts, progress)
        except CaughtUp as caught:
            # Others have committed without this island: it has their state now, and goes on from there.
            carried = progress if caught.is_kept else NOTHING
            parts.event(
                "caught up", f"{caught}; {progress.steps} inner steps {'kept' if caught.is_kept else 'dropped'}"
            )
            enter(parts, outer.position)
            continue
        carried = NOTHING
        if outer.position.round % parts.config.evaluate.every_rounds == 0 or outer.position.round == rounds:
            evaluate(parts)
    outer.finish()
    parts.event("left", f"the run's {rounds} rounds are done")


def enter(parts: Parts, position: Position) -> None:
    """Say where this island stands, after the state of others or the beginning."""
    parts.event("joined", f"round {position.round}, {position.tokens} tokens, digest {parts.outer.digest[:12]}")


def inner_steps(parts: Parts, carried: Progress) -> Progress:
    """Train until the round's inner steps are done, or until going on would be in vain; all progress of the round."""
    outer, trainer = parts.outer, parts.trainer
    # Learning-rate schedule and data position follow from the round, however many steps the last one had here.
    trainer.inner_step = outer.position.round * parts.config.outer.inner_steps
    last = trainer.inner_step + outer.pace.inner_steps
    steps, tokens = carried.steps, carried.tokens
    while True:
        batches = parts.batches.micro_batches(
            trainer.inner_step, trainer.data_rank, trainer.num_data_ranks, trainer.settings.micro_batch
        )
        started = time.monotonic()
        result = trainer.step(batches)
        parts.slow_down(time.monotonic() - started)
        parts.profiler.step()
        outer.pace.observe_step(time.monotonic() - started)
        steps, tokens = steps + 1, tokens + (0 if result.is_skipped else result.tokens)
        record_step(parts, result)
        left = last - trainer.inner_step
        if left <= 0 or outer.interruption(left):
            return Progress(steps, tokens)


def commit(parts: Parts, progress: Progress) -> None:
    """Attempts at the round until one commits everywhere. Raises CaughtUp, or OuterError when it cannot be done."""
    for _ in range(MAX_ATTEMPTS):
        report = parts.outer.attempt(progress.tokens)
        record_round(parts, report, progress)
        if report.is_committed:
            return
    raise OuterError(f"round {report.round} was aborted {MAX_ATTEMPTS} times in a row, at last because: {report.cause}")


def evaluate(parts: Parts) -> None:
    """Held-out loss of the global params: between a commit and the next inner step, local params are equal to them."""
    position = parts.outer.position
    record = evaluation(parts.config, parts.trainer, parts.corpus, position.round, position.tokens)
    if parts.metrics is not None:
        parts.metrics.evaluation(record)
        log.info("round %d: held-out loss %.4f, %.4f bits per byte", record.round, record.loss, record.bits_per_byte)


def record_step(parts: Parts, result: StepResult) -> None:
    """One line in metrics.jsonl, on the island's leader."""
    if parts.metrics is None or parts.speed is None:
        return
    parts.tokens += 0 if result.is_skipped else result.tokens
    parts.metrics.step(step_record(result, parts.tokens, parts.speed))


def record_round(parts: Parts, report: RoundReport, progress: Progress) -> None:
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
            gated=report.gated,
        )
    )
    for peer, kind, text, count in parts.network.refusals.drain():
        parts.metrics.event(EventRecord(name="refused", text=f"{peer}: {kind}: {text} ({count} times)"))
    state = "committed" if report.is_committed else f"aborted ({report.cause})"
    log.info("round %d attempt %d: %s with %s", report.round, report.attempt, state, ", ".join(report.participants))
    if report.is_committed and len(report.participants) == 1:
        log.warning("round %d: this island is ALONE in the run", report.round)
        parts.metrics.event(EventRecord(name="alone", text=f"round {report.round} was committed by this island alone"))
