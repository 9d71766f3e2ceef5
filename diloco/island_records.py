"""Writes an island's inner steps, rounds and events into its records.

Only the leader keeps records.
"""

from diloco.assemble import Runtime
from diloco.records.metrics import EventRecord
from diloco.runtime.progress import Progress
from diloco.runtime.step_records import make_step_record
from diloco.watchdog.rank_times import gather_times
from inner.data.batches import StepBatch
from inner.optim.spikes import Spike
from inner.trainer import StepResult
from outer.leases.ledger import Ledger
from outer.report import Landing
from outer.state.part_state import Position


def record_entry(runtime: Runtime, position: Position) -> None:
    """Record the position at which the island starts, or goes on after it has taken others' state."""
    runtime.on_entry()
    digest = runtime.outer.digest[:12]
    runtime.event("joined", f"round {position.round}, {position.tokens} tokens, digest {digest}")


def record_ledger(runtime: Runtime) -> None:
    """Record at the end how much of the text the run has trained on."""
    text = runtime.outer.position.ledger
    runtime.event("account", f"{text.trained} units of text trained; {text.open} reserved and not used")


def record_step(runtime: Runtime, result: StepResult, batch: StepBatch) -> None:
    """Record one inner step, and its loss spike if it is one. Only the leader does anything."""
    if runtime.metrics is None or runtime.speed is None:
        return
    runtime.tokens += 0 if result.is_skipped else result.tokens
    runtime.metrics.write(make_step_record(result, runtime.tokens, runtime.speed, batch))
    if result.spike is not None:
        runtime.event("loss spike", spike_text(result, result.spike))


def spike_text(result: StepResult, spike: Spike) -> str:
    """Return the logbook's text about a loss spike."""
    fates = {
        "note": "the step was made",
        "skip": "the step was skipped",
        "rewind": "the step was skipped, and the island went on from the global params",
    }
    return (
        f"inner step {result.step}: loss {result.loss:.4f}, {spike.deviations:.1f} standard deviations above the mean "
        f"of the steps before; {fates[spike.action]}"
    )


def record_round(runtime: Runtime, progress: Progress, landing: Landing, ledger: Ledger) -> None:
    """Record the committed attempt, and what was refused from peers since the last one."""
    ranks = gather_times(runtime.times, runtime.outer.replica.ranks)
    runtime.rounds.write(landing.reports[-1], progress, landing.waited_seconds, ledger, ranks)
    if runtime.metrics is None:
        return
    for peer, kind, text, count in runtime.network.rejections.drain():
        runtime.metrics.write(EventRecord(name="refused", text=f"{peer}: {kind}: {text} ({count} times)"))
