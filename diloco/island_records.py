"""Writes an island's inner steps, rounds and events into its records.

Only the leader keeps records.
"""

from diloco.assemble import Runtime
from diloco.runtime.progress import Progress
from diloco.runtime.step_records import make_step_record
from diloco.watchdog.rank_times import gather_times
from inner.data.batches import StepBatch
from inner.optim.expert_balance import COLLAPSED_STEPS
from inner.optim.spikes import Spike
from inner.trainer import StepResult
from outer.leases.ledger import Ledger
from outer.report import Landing


def record_step(runtime: Runtime, result: StepResult, batch: StepBatch) -> None:
    """Record one inner step, and its loss spike if it is one. Only the leader does anything."""
    if runtime.metrics is None or runtime.speed is None:
        return
    runtime.tokens += 0 if result.is_skipped else result.tokens
    runtime.metrics.write(make_step_record(result, runtime.tokens, runtime.speed, batch))
    if (traffic := runtime.traffic.take(result.step)) is not None:
        runtime.metrics.write(traffic)
    if result.spike is not None:
        runtime.event("loss spike", spike_text(result, result.spike))
    if result.overflows and runtime.trainer.loss_scale is not None:
        runtime.event("gradient overflow", overflow_text(result, runtime.trainer.loss_scale.value))
    for layer in result.routing.collapsed_layers if result.routing is not None else ():
        runtime.event("experts collapsed", collapse_text(result, layer))


def spike_text(result: StepResult, spike: Spike) -> str:
    """Return the logbook's text about a loss spike."""
    fates = {
        "note": "the step was made",
        "skip": "the step was skipped",
        "rewind": "the step was skipped, and the island went on from the global params",
    }
    return (
        f"inner step {result.step}: loss {result.loss:.4f}, {spike.deviations:.1f} standard "
        "deviations above the mean "
        f"of the steps before; {fates[spike.action]}"
    )


def overflow_text(result: StepResult, next_scale: float) -> str:
    """Return the logbook's text about a step in float16 whose scaled gradient was too large."""
    return (
        f"inner step {result.step}: the gradient was too large for float16 with a loss scale of "
        f"{result.loss_scale:g}; the step was skipped, and the loss scale is now {next_scale:g}"
    )


def collapse_text(result: StepResult, layer: int) -> str:
    """Return the logbook's text about a layer whose tokens go to one expert."""
    return (
        f"inner step {result.step}: for {COLLAPSED_STEPS} steps, one expert of layer {layer} got "
        "more than half of the "
        "tokens; raise optimizer.balance.bias_speed, or set optimizer.balance.sequence_loss"
    )


def record_round(runtime: Runtime, progress: Progress, landing: Landing, ledger: Ledger) -> None:
    """Record the committed attempt, with the times of the island's ranks, and warn once of buffers
    that change and are each island's own. Every rank calls it together.
    """
    times = gather_times(runtime.times, runtime.outer.replica.ranks)
    runtime.participation.record_round(progress, landing, ledger, times)
    if runtime.metrics is not None:
        runtime.buffer_watch.warn_of_changes()
