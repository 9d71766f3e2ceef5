"""Held-out evaluation of the global params, in the same way for islands and for the baseline."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from diloco.config.schema import RunConfig
from diloco.records.metrics import EvalRecord
from inner.data.batches import heldout_counts, heldout_windows
from inner.data.corpus import Corpus, Text
from inner.errors import InputError
from inner.trainer import Trainer

MAX_KEPT = 16
"""Number of evaluations that are kept. It is enough because islands are within a round of each
other; with gossip each island has its own params to evaluate."""


def evaluate_heldout(
    config: RunConfig, trainer: Trainer, corpus: Corpus, round_number: int, tokens: int
) -> EvalRecord:
    """Compute the held-out loss of the trainer's current params, and of each source. Every rank
    must call it.
    """
    began = time.monotonic()
    seq_len = config.data.seq_len
    wanted = config.evaluate.tokens
    compared = corpus.compared
    counts_of = dict(zip(compared.texts, heldout_counts(compared, seq_len, wanted), strict=True))
    # A source without a part in the mixture's loss (of small weight, or of this island alone) still
    # gets a loss of its own.
    counts = [counts_of.get(text, 0) for text in corpus.texts]
    sums = [
        _sum_losses(
            config,
            trainer,
            replace(corpus, texts=(text,)),
            count or _windows_beside(text, seq_len, wanted),
        )
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
        seconds=time.monotonic() - began,
    )


def mean_loss(sums: Sequence[tuple[float, int]], wanted: int) -> float:
    """Return the mean loss from (summed loss, number of targets). Raises InputError if there is no
    target.
    """
    if not (targets := sum(number for _, number in sums)):
        raise InputError(
            f"evaluate.tokens={wanted}: this number of held-out tokens contains no target to "
            "learn, such as the words of an assistant; raise evaluate.tokens or data.seq_len"
        )
    return sum(loss for loss, _ in sums) / targets


def _windows_beside(text: Text, seq_len: int, num_tokens: int) -> int:
    """Return the windows to evaluate of a source outside the mixture's loss: one, or all of this
    island's own source.
    """
    return 1 if text.reader is None else -(-num_tokens // seq_len)


def _sum_losses(
    config: RunConfig, trainer: Trainer, corpus: Corpus, num_windows: int
) -> tuple[float, int]:
    """Return the summed loss and number of targets of the first held-out windows of a corpus of one
    source.
    """
    seq_len = config.data.seq_len
    micro_batch = trainer.settings.micro_batch
    place = trainer.data_rank, trainer.num_data_ranks
    return trainer.evaluate(
        heldout_windows(corpus, seq_len, num_windows * seq_len, *place, micro_batch)
    )


def bits_per_byte(loss: float, corpus: Corpus) -> float:
    """Convert a held-out loss in nats per token to bits per byte, which do not depend on the
    tokenizer.
    """
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
