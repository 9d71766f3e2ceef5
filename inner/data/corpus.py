"""The corpus of a run. Text is tokenised once into shards; all ranks and later runs map them."""

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from inner.config import DataConfig, SourceConfig
from inner.data.chat.coding import DTYPE, count_learned
from inner.data.lock import KeepAlive, hold_lock
from inner.data.mixture import StreamedTokens
from inner.data.prepare import (
    PrepareOptions,
    PrepareProgress,
    describe_losses,
    explain_write_errors,
    write_shards,
)
from inner.data.shards import ShardCounts, ShardedTokens, Tokens, open_split
from inner.data.sources.build import build_source
from inner.data.sources.own_source import OwnSource, check_own_source
from inner.data.token_files.open_files import CheckedTokens, open_token_files
from inner.data.tokenise import token_dtype
from inner.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    describe_ends,
    ends_identity,
    tokenizer_fingerprint,
)
from inner.errors import InputError
from inner.files import make_cache_folder

log = logging.getLogger(__name__)

FORMAT = 3
"""Part of the cache key. Increase it when the same config would give other tokens or files."""
CHAT_FORMAT = 2
"""Part of the cache key of conversations. Increase it when only the coding of conversations
changes."""
META = "meta.json"
TOKENS = "tokens"
"""The source that needs no tokenising, because data.paths names token files."""
SHARDS = "shards"
"""The source of text that was prepared into a store. inner/data/streaming opens it."""
SAMPLE_TOKENS = 1 << 20
"""Number of held-out ids of token files that are decoded to count the bytes of their text."""
KEY_FIELDS = {*SourceConfig.model_fields, "tokenizer", "heldout_fraction"}
"""Fields of DataConfig on which the token files of a source depend."""


@dataclass(frozen=True, eq=False)
class Text:
    """Token ids of one source. Each document ends with eos; held-out documents are not in
    `train`.
    """

    train: Tokens | StreamedTokens
    heldout: Tokens
    heldout_bytes: int
    """Number of UTF-8 bytes that the held-out tokens encode, needed for bits per byte."""
    name: str = ""
    """Name of the mixture entry; empty without a mixture."""
    weight: float = 1.0
    reader: tuple[int, int] | None = None
    """For a source that only some islands read: this island's number among them, and the number of
    these islands."""
    is_coded: bool = False
    """Whether the ids come from conversations and are coded as in inner/data/chat/coding.py."""


@dataclass(frozen=True)
class Corpus:
    """The text of a run: one source, or several that are mixed by weight."""

    texts: tuple[Text, ...]
    vocab_size: int
    eos_id: int
    shuffled_tokens: int | None = None
    """Number of tokens in a shard if sequences are shuffled within shards (data.order: shards);
    None if all are shuffled together."""

    @property
    def weights(self) -> list[float]:
        return [text.weight for text in self.texts]

    def close(self) -> None:
        """Release the threads, processes and cached shards that reading needs."""
        for text in self.texts:
            if isinstance(text.train, StreamedTokens):
                text.train.close()

    @property
    def compared(self) -> "Corpus":
        """The texts whose held-out loss islands compare: those that all islands have, or else all
        texts.
        """
        return replace(
            self, texts=tuple(text for text in self.texts if text.reader is None) or self.texts
        )

    @property
    def heldout_tokens_per_byte(self) -> float:
        """Average tokens per byte over the held-out texts, in the proportions of the mixture."""
        return 1 / sum(
            text.weight / sum(self.weights) * text.heldout_bytes / len(text.heldout)
            for text in self.texts
        )


def without_texts(config: DataConfig) -> Corpus:
    """Return a corpus with the facts that are known before any text is here. Raises InputError."""
    tokenizer = build_tokenizer(*config.tokenizer_choice)
    return Corpus((), tokenizer.vocab_size, tokenizer.eos_id)


@dataclass(frozen=True)
class CorpusMeta:
    """Contents of meta.json."""

    vocab_size: int
    eos_id: int
    dtype: str
    train_tokens: int
    heldout_tokens: int
    heldout_bytes: int


def check_source(config: DataConfig) -> None:
    """Check that the tokenizer loads and that every source yields a document. Raises InputError if
    not.
    """
    tokenizer = build_tokenizer(*config.tokenizer_choice)
    for each in config.sources:
        if each.source == SHARDS:
            continue
        if each.source == TOKENS:
            open_token_files(each.paths, tokenizer.vocab_size)
            continue
        source = build_source(each)
        if isinstance(source, OwnSource):
            check_own_source(source)
        next(source.documents())


def prepare_corpus(
    config: DataConfig, cache_dir: Path, options: PrepareOptions | None = None
) -> Corpus:
    """Load the corpus of `config` from `cache_dir`; first read and tokenise the text that is
    missing there.

    If several processes ask for the same corpus, one prepares it and the others wait. Raises
    InputError when a source is broken or the disk is full; finished shards stay, and the next call
    continues after them.
    """
    entries = [(entry.name, entry.weight) for entry in config.mixture] or [("", 1.0)]
    tokenizer = build_tokenizer(*config.tokenizer_choice)
    texts = []
    for source, entry in zip(config.sources, entries, strict=True):
        if source.source == TOKENS:
            texts.append(open_tokens(source, tokenizer, entry))
        else:
            texts.append(open_prepared(source, cache_dir, entry, options))
    return Corpus(tuple(texts), tokenizer.vocab_size, tokenizer.eos_id)


def open_prepared(
    source: DataConfig,
    cache_dir: Path,
    entry: tuple[str, float],
    options: PrepareOptions | None = None,
) -> Text:
    """Open one source; tokenise it first if it is not in the cache. Raises InputError."""
    assert source.source != SHARDS, "inner/data/streaming opens it"
    folder = _find_or_prepare(source, cache_dir, options or PrepareOptions())
    return _open_text(folder, _read_meta(folder), entry)


def _find_or_prepare(config: DataConfig, cache_dir: Path, options: PrepareOptions) -> Path:
    """Return the folder with all shards of one source; prepare the missing ones first."""
    folder = cache_dir / _cache_key(config)
    if folder.exists():
        return folder
    with explain_write_errors(cache_dir):
        make_cache_folder(cache_dir)
    with hold_lock(cache_dir / f".{folder.name}.lock", f"the text in {folder}") as keep_alive:
        # The process that held the lock before may have finished the work.
        if not folder.exists():
            _prepare(config, folder, options, keep_alive)
    return folder


def _cache_key(config: DataConfig) -> str:
    return f"{config.source.rpartition(':')[2]}-{text_identity(config, [FORMAT])}"


def text_identity(config: DataConfig, more: list[object]) -> str:
    """Return 16 hexadecimal digits that differ for other texts, tokenizers, held-out shares, and
    values of `more`.
    """
    chat = config.format == "chat"
    parts = [
        *more,
        *([CHAT_FORMAT] if chat else []),
        config.model_dump(mode="json", include=KEY_FIELDS | ({"seq_len"} if chat else set())),
        build_source(config).fingerprint(),
        tokenizer_fingerprint(config.tokenizer),
        *ends_identity(build_tokenizer(*config.tokenizer_choice)),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _prepare(
    config: DataConfig, folder: Path, options: PrepareOptions, keep_alive: KeepAlive
) -> None:
    """Write shards to a temporary folder, perhaps one of an earlier process; rename it to
    `folder`.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")

    def report(progress: PrepareProgress) -> None:
        keep_alive()
        options.report(progress)

    try:
        with explain_write_errors(folder):
            unfinished.mkdir(exist_ok=True)
        counts = write_shards(config, unfinished, replace(options, report=report))
        _require_both_splits(config, counts)
        with explain_write_errors(folder):
            (unfinished / META).write_text(
                json.dumps(asdict(_build_meta(config, counts)), indent=1)
            )
            unfinished.rename(folder)
    finally:
        # rmdir succeeds only on an empty folder: a failure before the first finished shard leaves
        # no folder behind.
        with suppress(OSError):
            unfinished.rmdir()
    log.info(
        "prepared %d training and %d held-out tokens from %d + %d documents of %s",
        counts.train_tokens, counts.heldout_tokens, counts.train_documents,
        counts.heldout_documents, config.source,
    )  # fmt: skip
    if losses := describe_losses(counts, config.seq_len):
        log.warning("%s", losses)
    log.info(
        "data.tokenizer %s: %s",
        config.tokenizer,
        describe_ends(build_tokenizer(*config.tokenizer_choice)),
    )


def _build_meta(config: DataConfig, counts: ShardCounts) -> CorpusMeta:
    tokenizer = build_tokenizer(*config.tokenizer_choice)
    # The last training document is cut at max_tokens. Held-out documents stay whole, because their
    # bytes have been counted.
    train_tokens = min(counts.train_tokens, config.max_tokens or counts.train_tokens)
    return CorpusMeta(
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=DTYPE if config.format == "chat" else token_dtype(tokenizer),
        train_tokens=train_tokens,
        heldout_tokens=counts.heldout_tokens,
        heldout_bytes=counts.heldout_bytes,
    )


def _require_both_splits(config: DataConfig, counts: ShardCounts) -> None:
    if counts.train_documents and counts.heldout_documents:
        return
    losses = describe_losses(counts, config.seq_len)
    cure = (
        f"{'raise data.seq_len, ' if losses else ''}or "
        f"{'raise' if counts.train_documents else 'lower'}"
    )
    raise InputError(
        f"data.source={config.source}: {losses and losses + '; '}{counts.train_documents} "
        "documents to train on and "
        f"{counts.heldout_documents} held out with "
        f"data.heldout_fraction={config.heldout_fraction}; need at least one "
        "of each: give more text, "
        f"{cure} data.heldout_fraction"
    )


def _read_meta(folder: Path) -> CorpusMeta:
    try:
        meta = CorpusMeta(**json.loads((folder / META).read_bytes()))
        if meta.dtype not in ("uint16", "uint32", DTYPE):
            raise ValueError(f"dtype {meta.dtype!r}")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / META} is damaged ({error}); delete {folder}") from None
    return meta


def _open_text(folder: Path, meta: CorpusMeta, entry: tuple[str, float]) -> Text:
    train = open_split(folder, "train", meta.dtype, meta.train_tokens)
    heldout = open_split(folder, "heldout", meta.dtype, meta.heldout_tokens)
    if meta.dtype != DTYPE:
        return Text(train, heldout, meta.heldout_bytes, *entry)
    # The loss and meta.heldout_bytes count the assistant's words only. The bytes are scaled up to
    # all tokens, so that tokens per byte is right for the tokens that the loss counts.
    learned = count_learned(heldout[:])
    if not learned:
        raise InputError(
            "data.format=chat: the held-out conversations have no message of an assistant; give "
            "more rows"
        )
    num_bytes = round(meta.heldout_bytes * len(heldout) / learned)
    return Text(train, heldout, num_bytes, *entry, is_coded=True)


def open_tokens(config: DataConfig, tokenizer: Tokenizer, entry: tuple[str, float]) -> Text:
    """Map the token files of `config`, and hold out the last documents. Raises InputError."""
    files = open_token_files(config.paths, tokenizer.vocab_size)
    if no_eos := [
        file.path
        for file in files
        if file.knows_documents and file.tokens[file.ends[0] - 1] != tokenizer.eos_id
    ]:
        log.warning(
            "%s: documents do not end with the tokenizer's eos (%d), so a model does not see where "
            "they end; "
            "data.document_mask has no effect", no_eos[0], tokenizer.eos_id,
        )  # fmt: skip
    whole = ShardedTokens([file.tokens for file in files], [file.ends for file in files])
    train, heldout = whole.split(_heldout_begin(whole, config.heldout_fraction))
    train, _ = train.split(config.max_tokens or len(train))
    sample = CheckedTokens(heldout, tokenizer.vocab_size)[:SAMPLE_TOKENS]
    num_bytes = len(tokenizer.decode(sample).encode()) * len(heldout) // max(len(sample), 1)
    of_run = tokenizer.vocab_size
    return Text(CheckedTokens(train, of_run), CheckedTokens(heldout, of_run), num_bytes, *entry)


def _heldout_begin(whole: ShardedTokens, fraction: float) -> int:
    """Return where the held-out part begins: at the last end of a document that leaves at least the
    fraction `fraction`.
    """
    at = min(int(len(whole) * (1 - fraction)), len(whole) - 1)
    ends = whole.document_ends()
    number = int(np.searchsorted(ends, at, side="right"))
    return int(ends[number - 1]) if number else at
