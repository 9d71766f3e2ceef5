"""Make the records of steps and evaluations, in the same way for islands and for the data-parallel
baseline.
"""

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
"""Number of evaluations that are kept. It is enough because islands are within a round of each
other; with gossip each island has its own params to evaluate."""


@dataclass(frozen=True)
class MfuMeter:
    """Computes an island's model FLOPs utilisation from its tokens per second."""

    flops_per_token: float
    peak: float | None
    """Peak FLOP/s of one rank; None if it is not known for this device and compute dtype, or not
    used."""
    num_ranks: int
    source: str = ""
    """The peak and its source, as text; empty if it is not used."""

    def at_length(self, config: RunConfig, corpus: Corpus) -> "MfuMeter":
        """Return the meter for sequences of this config's length."""
        model = resolve_model(config.model, corpus.vocab_size)
        if isinstance(model, OwnModel):
            return self
        return replace(self, flops_per_token=flops_per_token(model, config.data.seq_len).total)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the model FLOPs utilisation, defined as in inner/flops.py."""
        if self.peak is None:
            return None
        return utilisation(self.flops_per_token, tokens_per_second, self.num_ranks, self.peak)


def build_mfu_meter(config: RunConfig, island: IslandConfig, corpus: Corpus, device: str) -> MfuMeter:
    """Return the meter of an island with this config. Measuring the device's peak takes less than a
    second.

    The FLOPs of an own model are not known, so its utilisation is None.
    """
    model = resolve_model(config.model, corpus.vocab_size)
    if isinstance(model, OwnModel):
        return MfuMeter(0.0, None, island.ranks)
    flops = flops_per_token(model, config.data.seq_len)
    peak, source = find_peak(device, island.resolve_compute_dtype(device), count_sharers())
    return MfuMeter(flops.total, peak, island.ranks, source)


def find_peak(device: str, dtype: str, num_sharers: int) -> tuple[float | None, str]:
    """Return the peak FLOP/s of one rank (None if it is not known), and its source as text.

    It is measured, unless several islands share the device: then a measurement would depend on the
    load of the others.
    """
    if num_sharers > 1:
        return peak_by_sheet(torch.cuda.get_device_name(device), dtype, num_sharers)
    peak = peak_flops(device, dtype)
    return peak, describe_peak(peak, dtype, f"measured on {device}")


def peak_by_sheet(device_name: str, dtype: str, num_sharers: int) -> tuple[float | None, str]:
    """Return what find_peak returns, from the data sheet of a GPU that several islands share.
    Data sheets list products in bf16.
    """
    sheet = find_sheet(device_name) if dtype == "bfloat16" else None
    source = (
        f"no data sheet of {device_name!r} is known here"
        if sheet is None
        else f"by the {sheet.source.partition(';')[0]}"
    )
    peak = None if sheet is None else sheet.flops
    return peak, describe_peak(peak, dtype, f"{source}; not measured, because {num_sharers} islands share the GPU")


def describe_peak(peak: float | None, dtype: str, source: str) -> str:
    """Return a text about the peak to which utilisations are relative."""
    what = "mfu is unknown" if peak is None else f"mfu is relative to {peak / 1e12:.3g} TFLOP/s per rank"
    return f"{what} in {dtype}, {source}"


def note_peak(book: Logbook, speed: MfuMeter | None) -> None:
    """Write to the logbook to which peak utilisations are relative. Only a leader has a meter."""
    if speed is not None and speed.source:
        book.note("peak", speed.source)


def make_step_record(result: StepResult, tokens: int, speed: MfuMeter, batch: StepBatch) -> StepRecord:
    """Return the record of an inner step. `tokens`: total number of tokens that the island has
    trained on.
    """
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
    # A source without a part in the mixture's loss (of small weight, or of this island alone) still
    # gets a loss of its own.
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
    """Return the mean loss from (summed loss, number of targets). Raises InputError if there is no
    target.
    """
    if not (targets := sum(number for _, number in sums)):
        raise InputError(
            f"evaluate.tokens={wanted}: this number of held-out tokens contains no target to learn, such as the "
            "words of an assistant; raise evaluate.tokens or data.seq_len"
        )
    return sum(loss for loss, _ in sums) / targets


def _windows_beside(text: Text, seq_len: int, num_tokens: int) -> int:
    """Return the windows to evaluate of a source outside the mixture's loss: one, or all of this
    island's own source.
    """
    return 1 if text.reader is None else -(-num_tokens // seq_len)


def _sum_losses(config: RunConfig, trainer: Trainer, corpus: Corpus, num_windows: int) -> tuple[float, int]:
    """Return the summed loss and number of targets of the first held-out windows of a corpus of one
    source.
    """
    seq_len, micro_batch = config.data.seq_len, trainer.settings.micro_batch
    place = trainer.data_rank, trainer.num_data_ranks
    return trainer.evaluate(heldout_windows(corpus, seq_len, num_windows * seq_len, *place, micro_batch))


def bits_per_byte(loss: float, corpus: Corpus) -> float:
    """Convert a held-out loss in nats per token to bits per byte, which do not depend on the tokenizer."""
    return loss / math.log(2) * corpus.heldout_tokens_per_byte


class SharedEvaluations:
    """Held-out losses that islands of one process share. Each is computed once, in the thread that
    first asks for it.

    After a commit all islands hold the same global params, so their losses are equal bit for bit.
    The first island that comes to an evaluation computes it for all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, Future[EvalRecord]] = OrderedDict()

    def find(self, key: Hashable, evaluate: Callable[[], EvalRecord]) -> EvalRecord:
        """Return the result of `evaluate`, or the stored result of the island that first used an
        equal key.

        `key` must contain everything on which the loss depends. Waits while that island's
        `evaluate` runs, which must not wait for other islands. Its exception is raised for all
        islands.
        """
        own = Future[EvalRecord]()
        with self._lock:
            found = self._found.setdefault(key, own)
            if len(self._found) > MAX_KEPT:
                self._found.popitem(last=False)
        if found is own:
            try:
                own.set_result(evaluate())
            except BaseException as error:  # noqa: BLE001 - raised below, and for the other islands
                own.set_exception(error)
        return replace(found.result(), time=time.time())
