"""The loop of one island: enter the run -> (inner steps -> round) x rounds -> leave. Read this
first.

Every rank of the island runs `run`, in step with the others. assemble.py builds what it works with,
island_rounds/ says when rounds are launched and land, island_duties/ what the island does around
them, and outer/loop.py describes a round. With `outer.wait_for: quorum` rounds and duties are other
ones, and the loop is the same.
"""

import time
from dataclasses import replace

from diloco.assemble import Runtime
from diloco.island_duties.actions import evaluate, resume
from diloco.island_duties.duties import Duties, build_duties
from diloco.island_records import record_step
from diloco.runtime.garbage import collect_garbage
from inner.errors import TrainingStopped
from inner.trainer import StepResult


def run(runtime: Runtime) -> None:
    """Train until the run is over. Raises TrainingStopped or OuterError when it cannot go on."""
    outer = runtime.outer
    runtime.activity.start_untimed("entering the run")
    resumed = resume(runtime)
    outer.begin()
    runtime.participation.record_entry(outer.position)
    runtime.enter_stage(outer.position.ledger)
    duties = build_duties(runtime, has_saved=resumed is not None)
    if resumed is not None and (resumed.round, resumed.digest) == (
        outer.position.round,
        outer.digest,
    ):
        duties.rounds.resume(resumed.point)
    else:
        runtime.participation.count_moments()
        evaluate(runtime, duties.cycle)
    train_rounds(runtime, duties)
    if cause := duties.rounds.stopped:
        leave_early(runtime, f"{cause}; {duties.progress}")
    else:
        duties.end()
        leave_at_the_end(runtime, duties.result)


def train_rounds(runtime: Runtime, duties: Duties) -> None:
    """Make inner steps until the run is over or the island leaves."""
    rounds = duties.rounds
    rounds.proceed()
    while not rounds.is_over:
        try:
            result = train(runtime)
        except TrainingStopped as stopped:
            earlier = duties.going_back.find_earlier(stopped, duties.first_unproven)
            if earlier is None:
                raise
            rounds.go_back(earlier)
            continue
        if result.spike is not None and result.spike.action == "rewind":
            runtime.outer.rewind()
        if result.routing is not None and not result.is_skipped:
            runtime.outer.count_routed(result.routing.layers, result.routing.counts)
        rounds.step(0 if result.is_skipped else result.tokens)


def train(runtime: Runtime) -> StepResult:
    """Make one inner step, measure and record it. Its seconds include the wait for a turn to
    compute.

    Raises TrainingStopped if the losses do not become finite.
    """
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
    with runtime.turns, runtime.traffic.counting():
        result = trainer.step(batch.micro_batches)
    result = replace(result, seconds=time.monotonic() - started)
    runtime.times.end(batch.seconds)
    runtime.slow_down(result.seconds)
    runtime.profiler.step()
    runtime.outer.pace.observe_step(time.monotonic() - started)
    record_step(runtime, result, batch)
    collect_garbage(result.step)
    return result


def leave_early(runtime: Runtime, why: str) -> None:
    """Leave a run that goes on without this island."""
    runtime.activity.start_untimed("leaving")
    runtime.outer.leave()
    runtime.event("left", why)


def leave_at_the_end(runtime: Runtime, result: str) -> None:
    """Stay until the other islands have the last round, then leave the run."""
    runtime.activity.start_untimed("leaving")
    runtime.outer.finish()
    if runtime.config.outer.gossip is None:
        runtime.participation.record_ledger()
    runtime.event("left", result)
