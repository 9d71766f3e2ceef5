"""One island's life: join -> (inner steps -> round) x rounds -> leave. Read this first.

Every rank of the island runs `run`, in step with the others. What the parts are and how they are built is in
assemble.py; what happens inside a round is in outer/sync.py.
"""

import logging

from diloco.assemble import Parts
from diloco.measure import evaluation, step_record
from diloco.metrics import EventRecord, RoundRecord
from inner.trainer import StepResult
from outer.agreement import Behind
from outer.errors import OuterError
from outer.state import Position
from outer.sync import RoundReport

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 100
"""Aborted attempts at one round before the island gives up."""


def run(parts: Parts) -> None:
    """Train until the run's last round is committed. Raises TrainingStopped or OuterError when it cannot go on."""
    outer, rounds = parts.outer, parts.config.outer.rounds
    enter(parts, outer.begin())
    evaluate(parts)
    while outer.position.round < rounds:
        tokens = inner_steps(parts)
        try:
            commit(parts, tokens)
        except Behind as behind:
            # Others have gone on without this island: its progress of this round is dropped, it goes on from theirs.
            parts.event("caught up", str(behind))
            enter(parts, outer.position)
            continue
        if outer.position.round % parts.config.evaluate.every_rounds == 0 or outer.position.round == rounds:
            evaluate(parts)
    outer.leave()
    parts.event("left", f"the run's {rounds} rounds are done")


def enter(parts: Parts, position: Position) -> None:
    """Stand where the run stands: learning-rate schedule and data position follow from the round."""
    parts.trainer.inner_step = position.round * parts.config.outer.inner_steps
    parts.event("joined", f"round {position.round}, {position.tokens} tokens, digest {parts.outer.digest[:12]}")


def inner_steps(parts: Parts) -> int:
    """Train until the round's inner steps are done; the tokens trained on."""
    last = (parts.outer.position.round + 1) * parts.config.outer.inner_steps
    tokens = 0
    while parts.trainer.inner_step < last:
        trainer = parts.trainer
        batches = parts.batches.micro_batches(
            trainer.inner_step, trainer.data_rank, trainer.num_data_ranks, trainer.settings.micro_batch
        )
        result = trainer.step(batches)
        parts.profiler.step()
        tokens += 0 if result.is_skipped else result.tokens
        record_step(parts, result)
    return tokens


def commit(parts: Parts, tokens: int) -> None:
    """Attempts at the round until one commits everywhere. Raises Behind, or OuterError when it cannot be done."""
    for _ in range(MAX_ATTEMPTS):
        report = parts.outer.attempt(tokens)
        record_round(parts, report)
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


def record_round(parts: Parts, report: RoundReport) -> None:
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
        )
    )
    state = "committed" if report.is_committed else f"aborted ({report.cause})"
    log.info("round %d attempt %d: %s with %s", report.round, report.attempt, state, ", ".join(report.participants))
    if report.is_committed and len(report.participants) == 1:
        log.warning("round %d: this island is ALONE in the run", report.round)
        parts.metrics.event(EventRecord(name="alone", text=f"round {report.round} was committed by this island alone"))
