"""The longer pieces of work around an island's rounds: resume, evaluate, save. All ranks call each
of them together.
"""

import logging
import time
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import replace

from diloco.assemble import Runtime
from diloco.records.metrics import SAVING, EvalRecord, PauseRecord
from diloco.runtime.evaluation import evaluate_heldout
from diloco.runtime.progress import ResumedState, ResumePoint

log = logging.getLogger(__name__)


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


def await_round(runtime: Runtime) -> None:
    """Note that the training thread waits for a round, with no limit while it shows signs of
    life.
    """
    if runtime.metrics is None:
        runtime.activity.start_untimed(
            "a round"
        )  # Other ranks wait for the leader, whose watchdog ends them, too.
    else:
        runtime.activity.start_beating("a round", runtime.outer.pace.deadlines.limit("reduce"))


def evaluate(runtime: Runtime, cycle: int) -> None:
    """Evaluate the global params on held-out text, and record the loss for this cycle."""
    position = runtime.outer.position
    is_plain = runtime.config.outer.is_plain

    def evaluate_here() -> EvalRecord:
        # In plain rounds the local params are equal to the global params at this point.
        with nullcontext() if is_plain else runtime.outer.global_params(), runtime.turns:
            return evaluate_heldout(
                runtime.stage_config, runtime.trainer, runtime.corpus, cycle, position.tokens
            )

    runtime.activity.start("evaluation")
    began = time.monotonic()
    shared = runtime.evaluations
    record = (
        evaluate_here()
        if shared is None
        else shared.find(evaluation_key(runtime, cycle), evaluate_here)
    )
    if runtime.metrics is not None:
        runtime.metrics.write(replace(record, seconds=time.monotonic() - began))
        log.info(
            "round %d: held-out loss %.4f, %.4f bits per byte",
            record.round,
            record.loss,
            record.bits_per_byte,
        )


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
        runtime.event(
            "not saved",
            f"no loss has been finite since inner step {since}; earlier checkpoints are kept",
        )
        return
    runtime.activity.start("a checkpoint")
    began = time.monotonic()
    problem = runtime.checkpoints.save(point, runtime.tokens)
    if runtime.metrics is not None:
        runtime.metrics.write(PauseRecord(name=SAVING, seconds=time.monotonic() - began))
    if problem is not None:
        runtime.event("not saved", f"{problem}; training goes on")
