"""The record of an inner step, in the same way for islands and for the data-parallel baseline."""

from diloco.records.metrics import StepRecord
from diloco.runtime.mfu import MfuMeter
from inner.data.batches import StepBatch
from inner.trainer import StepResult


def make_step_record(
    result: StepResult, tokens: int, speed: MfuMeter, batch: StepBatch
) -> StepRecord:
    """Return the record of an inner step. `tokens`: total number of tokens that the island has
    trained on.
    """
    tokens_per_second = result.tokens / result.seconds
    return StepRecord(
        **{
            name: getattr(result, name)
            for name in ("step", "loss", "lr", "grad_norm", "seconds", "loss_scale")
        },
        tokens=tokens,
        tokens_per_second=tokens_per_second,
        mfu=speed.mfu(tokens_per_second),
        skipped=result.is_skipped,
        overflow=result.overflows,
        data_seconds=batch.seconds,
        source_tokens={} if result.is_skipped else batch.source_tokens,
        spike=None if result.spike is None else result.spike.deviations,
        noise_scale={} if result.noise is None else result.noise.figures,
        expert_loads={} if result.routing is None else result.routing.loads_by_layer,
        routing={} if result.routing is None else result.routing.figures,
        depth_losses={str(depth): loss for depth, loss in enumerate(result.depth_losses, start=1)},
    )
