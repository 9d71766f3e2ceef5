"""What islands and the baseline measure alike: a step's record, and held-out loss."""

import math

from diloco.config import RunConfig
from diloco.metrics import EvalRecord, StepRecord
from inner.data.batches import heldout_windows
from inner.data.corpus import Corpus
from inner.trainer import StepResult, Trainer


def step_record(result: StepResult, tokens: int) -> StepRecord:
    """The record of an inner step; `tokens` are all that have been trained on so far."""
    return StepRecord(
        step=result.step,
        tokens=tokens,
        loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm,
        seconds=result.seconds,
        tokens_per_second=result.tokens / result.seconds,
        skipped=result.is_skipped,
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
    bits_per_byte = loss / math.log(2) * len(corpus.heldout) / corpus.heldout_bytes
    return EvalRecord(round=round_number, tokens=tokens, loss=loss, bits_per_byte=bits_per_byte)
