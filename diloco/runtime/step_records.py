"""Step and evaluation records, made in the same way by islands and by the data-parallel baseline."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from diloco.config.schema import IslandConfig, RunConfig
from diloco.planning.mesh.gpus import find_sheet
from diloco.records.logbook import Logbook
from diloco.records.metrics import EvalRecord, StepRecord
from diloco.runtime.devices.gpus import count_sharers
from inner.data.batches import StepBatch, heldout_counts, heldout_windows
from inner.data.corpus import Corpus, Text
from inner.errors import InputError
from inner.flops import flops_per_token
from inner.measure.peak_flops import peak_flops, utilisation
from inner.model.sizes import OwnModel, resolve_model
from inner.trainer import StepResult, Trainer

MAX_KEPT = 16
"""Evaluations that are kept. Islands are within a round of each other; with gossip each has params of its own."""


@dataclass(frozen=True)
class MfuMeter:
    """Computes an island's model FLOPs utilisation from its tokens per second."""

    flops_per_token: float
    peak: float | None
    """Peak FLOP/s of one rank; None if there is none for this device and compute dtype, or it is not used."""
    num_ranks: int
    source: str = ""
    """What the peak is and where it is from, as text; empty if nobody asks for it."""

    def at_length(self, config: RunConfig, corpus: Corpus) -> "MfuMeter":
        """The meter for sequences of this config's length."""
        model = resolve_model(config.model, corpus.vocab_size)
        if isinstance(model, OwnModel):
            return self
        return replace(self, flops_per_token=flops_per_token(model, config.data.seq_len).total)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation, in the convention of inner/flops.py."""
        if self.peak is None:
            return None
        return utilisation(self.flops_per_token, tokens_per_second, self.num_ranks, self.peak)


def build_mfu_meter(config: RunConfig, island: IslandConfig, corpus: Corpus, device: str) -> MfuMeter:
    """The meter of an island with this config. If it measures the device's peak, that takes less than a second.

    Nobody counts the FLOPs of an own model, so it has no utilisation.
    """
    model = resolve_model(config.model, corpus.vocab_size)
    if isinstance(model, OwnModel):
        return MfuMeter(0.0, None, island.ranks)
    flops = flops_per_token(model, config.data.seq_len)
    peak, source = find_peak(device, island.resolve_compute_dtype(device), count_sharers())
    return MfuMeter(flops.total, peak, island.ranks, source)


def find_peak(device: str, dtype: str, num_sharers: int) -> tuple[float | None, str]:
    """Peak FLOP/s of one rank, None if it is not known, and where it is from, as text.

    It is measured, unless several islands have the device: they would measure what the others leave of it.
    """
    if num_sharers > 1:
        return peak_by_sheet(torch.cuda.get_device_name(device), dtype, num_sharers)
    peak = peak_flops(device, dtype)
    return peak, describe_peak(peak, dtype, f"measured on {device}")


def peak_by_sheet(device_name: str, dtype: str, num_sharers: int) -> tuple[float | None, str]:
    """The same from the data sheet of a GPU that several islands share. Sheets have the products in bf16."""
    sheet = find_sheet(device_name) if dtype == "bfloat16" else None
    source = (
        f"no data sheet of {device_name!r} is known here"
        if sheet is None
        else f"by the {sheet.source.partition(';')[0]}"
    )
    peak = None if sheet is None else sheet.flops
    return peak, describe_peak(peak, dtype, f"{source}; not measured, because {num_sharers} islands share the GPU")


def describe_peak(peak: float | None, dtype: str, source: str) -> str:
    """What utilisations are relative to, as text."""
    what = "mfu is unknown" if peak is None else f"mfu is relative to {peak / 1e12:.3g} TFLOP/s a rank"
    return f"{what} in {dtype}, {source}"


def note_peak(book: Logbook, speed: MfuMeter | None) -> None:
    """Note in the logbook what the utilisations of this start are relative to. Only a leader has a meter."""
    if speed is not None and speed.source:
        book.note("peak", speed.source)


def make_step_record(result: StepResult, tokens: int, speed: MfuMeter, batch: StepBatch) -> StepRecord:
    """The record of an inner step. `tokens` is the total number of tokens trained on so far."""
    tokens_per_second = result.tokens / result.seconds
    return StepRecord(
        **{name: getattr(result, name) for name in ("step", "loss", "lr", "grad_norm", "seconds")},
        tokens=tokens,
        tokens_per_second=tokens_per_second,
        mfu=speed.mfu(tokens_per_second),
        skipped=result.is_skipped,
        data_seconds=batch.seconds,
        source_tokens={} if result.is_skipped else batch.source_tokens,
        spike=None if result.spike is None else result.spike.deviations,
        noise_scale={} if result.noise is None else result.noise.figures,
    )


def evaluate_heldout(config: RunConfig, trainer: Trainer, corpus: Corpus, round_number: int, tokens: int) -> EvalRecord:
    """Compute the held-out loss of the trainer's current params, and of each source. Every rank must call it."""
    seq_len, wanted, compared = config.data.seq_len, config.evaluate.tokens, corpus.compared
    counts_of = dict(zip(compared.texts, heldout_counts(compared, seq_len, wanted), strict=True))
    # A source of little weight, or of this island alone, has a loss as well, and no part in the mixture's.
    counts = [counts_of.get(text, 0) for text in corpus.texts]
    sums = [
        _sum_losses(config, trainer, replace(corpus, texts=(text,)), count or _windows_beside(text, seq_len, wanted))
        for text, count in zip(corpus.texts, counts, strict=True)
    ]
    counted = [each for each, count in zip(sums, counts, strict=True) if count]
    loss = mean_loss(counted, wanted)
    by_source = {
        text.name: total / targets if targets and math.isfinite(total) else None
        for text, (total, targets) in zip(corpus.texts, sums, strict=True)
    }
    return EvalRecord(
        round=round_number,
        tokens=tokens,
        loss=loss,
        bits_per_byte=bits_per_byte(loss, compared),
        source_losses=by_source if len(corpus.texts) > 1 else {},
    )


def mean_loss(sums: Sequence[tuple[float, int]], wanted: int) -> float:
    """The loss over summed losses and numbers of targets. Raises InputError if `wanted` tokens hold no target."""
    if not (targets := sum(number for _, number in sums)):
        raise InputError(
            f"evaluate.tokens={wanted}: so many held-out tokens hold nothing that is learned, such as the words of an "
            "assistant; raise evaluate.tokens or data.seq_len"
        )
    return sum(loss for loss, _ in sums) / targets


def _windows_beside(text: Text, seq_len: int, num_tokens: int) -> int:
    """Windows of a source that has no part in the mixture's loss: one, or all that are wanted of this island's own."""
    return 1 if text.reader is None else -(-num_tokens // seq_len)


def _sum_losses(config: RunConfig, trainer: Trainer, corpus: Corpus, num_windows: int) -> tuple[float, int]:
    """Summed loss and number of targets of the first held-out windows of a corpus of one source."""
    seq_len, micro_batch = config.data.seq_len, trainer.settings.micro_batch
    place = trainer.data_rank, trainer.num_data_ranks
    return trainer.evaluate(heldout_windows(corpus, seq_len, num_windows * seq_len, *place, micro_batch))


def bits_per_byte(loss: float, corpus: Corpus) -> float:
    """Convert a held-out loss in nats per token to bits per byte, which do not depend on the tokenizer."""
    return loss / math.log(2) * corpus.heldout_tokens_per_byte


class SharedEvaluations:
    """Held-out losses that islands of one process share: each is found once, whichever thread asks for it first.

    After a commit all islands hold the same global params, so their losses are equal bit for bit, and the first island
    that comes to an evaluation makes it for all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, Future[EvalRecord]] = OrderedDict()

    def find(self, key: Hashable, evaluate: Callable[[], EvalRecord]) -> EvalRecord:
        """The record of `evaluate`, or of the island that was first to ask for an equal key.

        `key` must say everything that the loss depends on. Waits as long as that island's `evaluate`, which must not
        wait for other islands; what it raises is raised for all.
        """
        own = Future[EvalRecord]()
        with self._lock:
            found = self._found.setdefault(key, own)
            if len(self._found) > MAX_KEPT:
                self._found.popitem(last=False)
        if found is own:
            try:
                own.set_result(evaluate())
            except BaseException as error:  # noqa: BLE001 - raised below, and for the others
                own.set_exception(error)
        return replace(found.result(), time=time.time())
