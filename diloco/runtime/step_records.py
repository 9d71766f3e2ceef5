"""What islands and the baseline measure alike: a step's record, and held-out loss."""

import math
import time
from dataclasses import dataclass

from torch import Tensor

from diloco.config import IslandConfig, RunConfig
from diloco.metrics import EvalRecord, StepRecord
from inner.data.batches import IslandBatches, heldout_windows
from inner.data.corpus import Corpus
from inner.measure.flops import flops_per_token, peak_flops, utilisation
from inner.presets import resolve_sizes
from inner.trainer import StepResult, Trainer


@dataclass(frozen=True)
class Speedometer:
    """Tells how much of an island's arithmetic a number of tokens a second uses."""

    flops_per_token: float
    peak: float | None
    """Of one rank, operations a second, measured; None: this device has none in the compute dtype."""
    num_ranks: int

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation, in the convention of inner/measure/flops.py."""
        if self.peak is None:
            return None
        return utilisation(self.flops_per_token, tokens_per_second, self.num_ranks, self.peak)


def speedometer(config: RunConfig, island: IslandConfig, corpus: Corpus, device: str) -> Speedometer:
    """For an island of these; measures the device's peak, which takes less than a second."""
    sizes = resolve_sizes(config.model, corpus.vocab_size)
    flops = flops_per_token(sizes, config.data.seq_len)
    return Speedometer(flops.total, peak_flops(device, island.compute_dtype), island.ranks)


@dataclass(frozen=True)
class ReadUnit:
    """What a step has read, and how long it waited for that."""

    micro_batches: list[Tensor]
    """This rank's."""
    source_tokens: dict[str, int]
    """All ranks', by source; empty without a mixture."""
    seconds: float


def read_unit(batches: IslandBatches, unit: int, trainer: Trainer) -> ReadUnit:
    """This rank's share of a unit, for the trainer's next inner step."""
    started_at = time.perf_counter()
    micro_batch = trainer.settings.micro_batch
    micro_batches = batches.micro_batches(unit, trainer.data_rank, trainer.num_data_ranks, micro_batch)
    seconds = time.perf_counter() - started_at
    return ReadUnit(micro_batches, batches.tokens_by_source(unit) if batches.is_mixed else {}, seconds)


def step_record(result: StepResult, tokens: int, speed: Speedometer, reading: ReadUnit) -> StepRecord:
    """The record of an inner step; `tokens` are all that have been trained on so far."""
    tokens_per_second = result.tokens / result.seconds
    return StepRecord(
        step=result.step,
        tokens=tokens,
        loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm,
        seconds=result.seconds,
        tokens_per_second=tokens_per_second,
        mfu=speed.mfu(tokens_per_second),
        skipped=result.is_skipped,
        data_seconds=reading.seconds,
        source_tokens={} if result.is_skipped else reading.source_tokens,
    )


def evaluation(config: RunConfig, trainer: Trainer, corpus: Corpus, round_number: int, tokens: int) -> EvalRecord:
    """Held-out loss of the trainer's params as they are. Every rank must call it."""
    windows = heldout_windows(
        corpus,
        config.data.seq_len,
        config.evaluate.tokens,
        trainer.data_rank,
        trainer.num_data_ranks,
        trainer.settings.micro_batch,
    )
    loss_sum, num_targets = trainer.evaluate(windows)
    loss = loss_sum / num_targets
    return EvalRecord(round=round_number, tokens=tokens, loss=loss, bits_per_byte=bits_per_byte(loss, corpus))


def bits_per_byte(loss: float, corpus: Corpus) -> float:
    """A loss in nats a token on held-out text, whatever the tokenizer."""
    return loss / math.log(2) * corpus.heldout_tokens_per_byte
