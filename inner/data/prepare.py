"""Write a source as token shards. After a kill it resumes after the last finished shard, with the
same result.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from inner.config import DataConfig
from inner.data.chat.encode import end_of_sequence, fit, place
from inner.data.chat.messages import learned_text
from inner.data.shards import ShardBuilder, ShardCounts, finished_shards, publish_shard
from inner.data.sources.build import build_source
from inner.data.sources.documents import Document, hold_out_an_end, is_heldout
from inner.data.tokenise import EncodedDocument, tokenise_documents
from inner.errors import InputError

log = logging.getLogger(__name__)

SHARD_TOKENS = 1 << 24
"""Length in tokens at which a shard is finished. It bounds the memory in use and the work that a
kill can lose."""
LOG_SECONDS = 30.0


@dataclass
class PrepareProgress:
    """Progress in preparing one source."""

    source: str
    published: ShardCounts
    """Totals of the finished shards."""
    num_shards: int
    shard: ShardBuilder = field(default_factory=ShardBuilder)
    share: float | None = None
    """Share of the work that is done, 0 to 1; None if unknown."""

    def __post_init__(self) -> None:
        self._began_with = self.num_tokens
        self._began_at = time.monotonic()

    @property
    def num_documents(self) -> int:
        counts = self.published
        more = self.shard.counts
        return sum(each.train_documents + each.heldout_documents for each in (counts, more))

    @property
    def train_tokens(self) -> int:
        return self.published.train_tokens + self.shard.counts.train_tokens

    @property
    def heldout_tokens(self) -> int:
        return self.published.heldout_tokens + self.shard.counts.heldout_tokens

    @property
    def num_tokens(self) -> int:
        return self.train_tokens + self.heldout_tokens

    @property
    def tokens_per_second(self) -> float:
        """Speed of this process. Shards that an earlier process finished do not
        count.
        """
        return (self.num_tokens - self._began_with) / max(time.monotonic() - self._began_at, 1e-9)


ProgressCallback = Callable[[PrepareProgress], None]


def build_progress_log() -> ProgressCallback:
    """Return a callback that logs the progress every LOG_SECONDS."""
    last = time.monotonic()

    def report(progress: PrepareProgress) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            log.info(
                "%s: %d documents, %d tokens, %.0f tokens/s",
                progress.source, progress.num_documents, progress.num_tokens,
                progress.tokens_per_second,
            )  # fmt: skip

    return report


@dataclass(frozen=True)
class PrepareOptions:
    """Options of the preparation. They do not change the tokens; shard_tokens changes where the
    shards are cut.
    """

    processes: int = 1
    shard_tokens: int = SHARD_TOKENS
    report: ProgressCallback = field(default_factory=build_progress_log)
    """Called after each document."""


class CorpusLimits:
    """Decides which documents still fit into a corpus of data.max_tokens tokens, given the progress
    so far.
    """

    def __init__(self, config: DataConfig, progress: PrepareProgress) -> None:
        self.progress = progress
        self._fraction = config.heldout_fraction
        self.seq_len = config.seq_len if config.format == "chat" else None
        """Length of the sequences into which conversations are packed; None for text."""
        self.train = math.inf if config.max_tokens is None else config.max_tokens
        self._heldout = self.train * config.heldout_fraction

    @property
    def is_reached(self) -> bool:
        return (
            self.progress.train_tokens >= self.train
            and self.progress.heldout_tokens >= self._heldout
        )

    def is_heldout(self, document: Document) -> bool:
        return document.is_end or is_heldout(document.key, self._fraction)

    def has_place(self, document: Document) -> bool:
        """Return whether the document's split is not yet full. A full split stays full."""
        if self.is_heldout(document):
            return self.progress.heldout_tokens < self._heldout
        return self.progress.train_tokens < self.train

    def share(self, document: Document) -> float | None:
        """Return the share of the work that is done once this document is, 0 to 1; None if
        unknown.
        """
        return (
            document.share
            if math.isinf(self.train)
            else min(self.progress.train_tokens / self.train, 1.0)
        )


def chat_template(config: DataConfig) -> str | None:
    """Return the template of the conversations of `config`; None if it reads text."""
    return config.chat_template if config.format == "chat" else None


def write_shards(config: DataConfig, folder: Path, options: PrepareOptions) -> ShardCounts:
    """Write the missing shards of one source and return the totals of all. Only one process may
    call it at a time.

    Raises InputError if the source is broken or the disk is full; finished shards stay.
    """
    finished = finished_shards(folder)
    progress = PrepareProgress(config.source, sum(finished, ShardCounts()), len(finished))
    limits = CorpusLimits(config, progress)
    if not limits.is_reached:
        if finished:
            log.info("%s: resuming after %d finished shards", config.source, len(finished))
        with (
            closing(_unread_documents(config, progress.published.num_read)) as documents,
            closing(
                tokenise_documents(
                    documents,
                    config.tokenizer_choice,
                    options.processes,
                    limits.has_place,
                    chat_template(config),
                )
            ) as stream,
        ):
            _write(stream, folder, limits, options)
    return progress.published


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into an InputError that tells the user what to do."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder}: cannot write ({error.strerror}); make room, or set island.cache_dir to a "
            "disk with more space, "
            "and run it again: finished shards stay, and it resumes after them"
        ) from error


def _unread_documents(config: DataConfig, skip: int) -> Generator[Document, None, None]:
    documents: Iterable[Document] = build_source(config).documents()
    if config.format == "text":  # The end of a conversation makes no sense without its beginning.
        documents = hold_out_an_end(documents, config.heldout_fraction)
    yield from islice(documents, skip, None)


def _write(
    stream: Iterator[EncodedDocument], folder: Path, limits: CorpusLimits, options: PrepareOptions
) -> None:
    """Write the stream into shards until it ends or both splits are full."""
    progress = limits.progress
    for encoded in stream:
        document = encoded.document
        shard = progress.shard
        # Check again, because the split may have become full since the document was encoded.
        if limits.has_place(document):
            _add(encoded, limits)
        shard.counts.num_read += 1
        progress.share = limits.share(document)
        options.report(progress)
        if limits.is_reached:
            break
        if shard.num_tokens >= options.shard_tokens:
            _publish(folder, progress)
    if progress.shard.counts.num_read:
        _fill_last_sequence(limits)
        _publish(folder, progress)


def _add(encoded: EncodedDocument, limits: CorpusLimits) -> None:
    """Add a document to its split. A conversation is preceded by the padding that it needs."""
    if limits.seq_len is not None:
        _add_conversation(encoded, limits, limits.seq_len)
    elif limits.is_heldout(encoded.document):
        limits.progress.shard.add_heldout(
            encoded.ids, len(encoded.document.text.encode("utf-8", "replace"))
        )
    else:
        limits.progress.shard.add_train(encoded.ids)


def _add_conversation(encoded: EncodedDocument, limits: CorpusLimits, seq_len: int) -> None:
    progress = limits.progress
    fitted = fit(encoded.ids, seq_len)
    counts = progress.shard.counts
    if not len(fitted.coded):
        counts.unlearned += 1
        return
    counts.cut += fitted.is_cut
    if limits.is_heldout(encoded.document):
        num_bytes = len(learned_text(encoded.document.text).encode("utf-8", "replace"))
        ids = place(fitted.coded, progress.heldout_tokens, seq_len)
        progress.shard.add_heldout(ids, round(num_bytes * fitted.learned_share))
    else:
        progress.shard.add_train(place(fitted.coded, progress.train_tokens, seq_len))


def describe_losses(counts: ShardCounts, seq_len: int) -> str:
    """Return a line about conversations that sequences of this length cut or leave out; empty if
    they hold all.
    """
    if not counts.unlearned and not counts.cut:
        return ""
    read = counts.train_documents + counts.heldout_documents + counts.unlearned
    return (
        f"of {read} conversations, {counts.unlearned} are left out, because their answers begin "
        f"after data.seq_len={seq_len} tokens, and {counts.cut} are cut there"
    )


def _fill_last_sequence(limits: CorpusLimits) -> None:
    """Pad conversations up to the end of the last sequence of each split."""
    if limits.seq_len is not None:
        progress = limits.progress
        progress.shard.pad("train", end_of_sequence(progress.train_tokens, limits.seq_len))
        progress.shard.pad("heldout", end_of_sequence(progress.heldout_tokens, limits.seq_len))


def _publish(folder: Path, progress: PrepareProgress) -> None:
    with explain_write_errors(folder):
        publish_shard(folder, progress.num_shards, progress.shard)
    progress.published = progress.published + progress.shard.counts
    progress.num_shards += 1
    progress.shard = ShardBuilder()
