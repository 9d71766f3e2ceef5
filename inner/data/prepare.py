"""Text to shards on disk; killed, it goes on after the last finished shard, and the result is the same."""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from inner.config import DataConfig
from inner.data.documents import Document, is_heldout
from inner.data.encoding import Encoded, encoded
from inner.data.shards import Counts, Unfinished, finished_shards, publish_shard
from inner.data.sources import build_source
from inner.errors import InputError

log = logging.getLogger(__name__)

SHARD_TOKENS = 1 << 24
"""A shard is finished with the document that makes it so long. A kill loses no more, and memory holds no more."""
LOG_SECONDS = 30.0


@dataclass
class Progress:
    """How far the preparation of a source is."""

    source: str
    published: Counts
    """What finished shards hold."""
    num_shards: int
    shard: Unfinished = field(default_factory=Unfinished)
    share: float | None = None
    """How much of the source has been read, 0 to 1, where that is known."""

    def __post_init__(self) -> None:
        self._began_with = self.num_tokens
        self._began_at = time.monotonic()

    @property
    def num_documents(self) -> int:
        counts, more = self.published, self.shard.counts
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
        """Of this process, which may have begun with finished shards."""
        return (self.num_tokens - self._began_with) / max(time.monotonic() - self._began_at, 1e-9)


Report = Callable[[Progress], None]


def logged() -> Report:
    """Says in the log now and then how far a preparation is."""
    last = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            log.info(
                "%s: %d documents, %d tokens, %.0f tokens/s",
                progress.source, progress.num_documents, progress.num_tokens, progress.tokens_per_second,
            )  # fmt: skip

    return report


@dataclass(frozen=True)
class Options:
    """How to prepare. None of it changes the tokens; shard_tokens changes where they are cut into shards."""

    processes: int = 1
    shard_tokens: int = SHARD_TOKENS
    report: Report = field(default_factory=logged)
    """Called after each document."""


class Limits:
    """Which documents have a place in a corpus of data.max_tokens, by what is already there."""

    def __init__(self, config: DataConfig, progress: Progress) -> None:
        self._progress = progress
        self._fraction = config.heldout_fraction
        self.train = math.inf if config.max_tokens is None else config.max_tokens
        self._heldout = self.train * config.heldout_fraction

    @property
    def is_reached(self) -> bool:
        return self._progress.train_tokens >= self.train and self._progress.heldout_tokens >= self._heldout

    def is_heldout(self, document: Document) -> bool:
        """Of which split the document is."""
        return is_heldout(document.key, self._fraction)

    def has_place(self, document: Document) -> bool:
        """Whether its split is not full; once it is, it stays so."""
        if self.is_heldout(document):
            return self._progress.heldout_tokens < self._heldout
        return self._progress.train_tokens < self.train

    def share(self, document: Document) -> float | None:
        """How much of the work is done with this document."""
        return document.share if math.isinf(self.train) else min(self._progress.train_tokens / self.train, 1.0)


def write_shards(config: DataConfig, folder: Path, options: Options) -> Counts:
    """Write the shards of one source that are not there yet; what all hold. One process at a time may call it.

    InputError: the source is broken, or there is no room; finished shards stay.
    """
    there = finished_shards(folder)
    progress = Progress(config.source, sum(there, Counts()), len(there))
    limits = Limits(config, progress)
    if not limits.is_reached:
        if there:
            log.info("%s: %d finished shards are there: going on after them", config.source, len(there))
        with (
            closing(_documents(config, progress.published.num_read)) as documents,
            closing(encoded(documents, config.tokenizer, options.processes, limits.has_place)) as stream,
        ):
            _fill(stream, folder, limits, progress, options)
    return progress.published


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the disk refuses becomes one InputError with the cure."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder}: cannot write ({error.strerror}); finished shards stay: make room, or set island.cache_dir to "
            "a disk that has it, and run it again: it goes on after them"
        ) from error


def _documents(config: DataConfig, skip: int) -> Generator[Document, None, None]:
    yield from islice(build_source(config).documents(), skip, None)


def _fill(stream: Iterator[Encoded], folder: Path, limits: Limits, progress: Progress, options: Options) -> None:
    """Put the stream into shards until it ends or nothing more has a place."""
    for each in stream:
        _add(each, limits, progress.shard)
        progress.shard.counts.num_read += 1
        progress.share = limits.share(each.document)
        options.report(progress)
        if progress.shard.num_tokens >= options.shard_tokens or limits.is_reached:
            _publish(folder, progress)
        if limits.is_reached:
            return
    if progress.shard.counts.num_read:
        _publish(folder, progress)


def _add(each: Encoded, limits: Limits, shard: Unfinished) -> None:
    # Asked anew: it may have been encoded before its split was full.
    if not limits.has_place(each.document):
        return
    if limits.is_heldout(each.document):
        shard.add_heldout(each.ids, len(each.document.text.encode("utf-8", "replace")))
    else:
        shard.add_train(each.ids)


def _publish(folder: Path, progress: Progress) -> None:
    with writing(folder):
        publish_shard(folder, progress.num_shards, progress.shard)
    progress.published = progress.published + progress.shard.counts
    progress.num_shards += 1
    progress.shard = Unfinished()
