"""Text, tokenised once: shards of tokens that every later run and every rank maps into memory."""

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from inner.config import DataConfig, SourceConfig
from inner.data.encoding import token_dtype
from inner.data.lock import Beat, held
from inner.data.prepare import Options, Progress, write_shards, writing
from inner.data.shards import Counts, Tokens, open_split
from inner.data.sources import build_source
from inner.data.tokenizer import build_tokenizer, tokenizer_fingerprint
from inner.errors import InputError

log = logging.getLogger(__name__)

FORMAT = 3
"""Part of the cache key: raise it when the same config would give other tokens, or other files."""
META = "meta.json"
KEY_FIELDS = {*SourceConfig.model_fields, "tokenizer", "heldout_fraction"}
"""Of DataConfig: what the token files of a source depend on."""


@dataclass(frozen=True, eq=False)
class Text:
    """The token ids of one source, every document ended by eos; held-out documents are never in train."""

    train: Tokens
    heldout: Tokens
    heldout_bytes: int
    """UTF-8 bytes of the text behind all held-out tokens, for bits per byte."""
    name: str = ""
    """As the mixture has it; empty: there is no mixture."""
    weight: float = 1.0


@dataclass(frozen=True)
class Corpus:
    """What a run reads: one text, or several that are mixed by weight."""

    texts: tuple[Text, ...]
    vocab_size: int
    eos_id: int

    @property
    def weights(self) -> list[float]:
        return [text.weight for text in self.texts]

    @property
    def heldout_tokens_per_byte(self) -> float:
        """Of the held-out text, as the texts are mixed."""
        whole = sum(self.weights)
        return 1 / sum(text.weight / whole * text.heldout_bytes / len(text.heldout) for text in self.texts)


@dataclass(frozen=True)
class Meta:
    """What meta.json holds."""

    vocab_size: int
    eos_id: int
    dtype: str
    train_tokens: int
    heldout_tokens: int
    heldout_bytes: int


def check_source(config: DataConfig) -> None:
    """Return if the tokenizer loads and each source gives a first document; InputError says what is missing."""
    build_tokenizer(config.tokenizer)
    for source in config.sources:
        next(build_source(source).documents())


def prepare_corpus(config: DataConfig, cache_dir: Path, options: Options | None = None) -> Corpus:
    """The corpus of `config`, from `cache_dir` or read and tokenised now.

    Of several processes that want the same at once, one prepares and the others wait for it. InputError: a source
    is broken, or there is no room; what is finished stays, and the next call goes on there.
    """
    folders = [_prepared(source, cache_dir, options or Options()) for source in config.sources]
    entries = [(entry.name, entry.weight) for entry in config.mixture] or [("", 1.0)]
    metas = [_read_meta(folder) for folder in folders]
    texts = [_open(*each) for each in zip(folders, metas, entries, strict=True)]
    return Corpus(tuple(texts), metas[0].vocab_size, metas[0].eos_id)


def _prepared(config: DataConfig, cache_dir: Path, options: Options) -> Path:
    """The folder of one source's shards, all of them there."""
    folder = cache_dir / _cache_key(config)
    if folder.exists():
        return folder
    with writing(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
    with held(cache_dir / f".{folder.name}.lock", f"the text in {folder}") as beat:
        # Whoever held the lock before may have finished it.
        if not folder.exists():
            _prepare(config, folder, options, beat)
    return folder


def _cache_key(config: DataConfig) -> str:
    parts = [
        FORMAT,
        config.model_dump(mode="json", include=KEY_FIELDS),
        build_source(config).fingerprint(),
        tokenizer_fingerprint(config.tokenizer),
    ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{config.source}-{digest[:16]}"


def _prepare(config: DataConfig, folder: Path, options: Options, beat: Beat) -> None:
    """Fill the folder beside `folder` that an earlier process may have begun, then move it there."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")

    def report(progress: Progress) -> None:
        beat()
        options.report(progress)

    try:
        with writing(folder):
            unfinished.mkdir(exist_ok=True)
        counts = write_shards(config, unfinished, replace(options, report=report))
        _require_both(config, counts)
        with writing(folder):
            (unfinished / META).write_text(json.dumps(asdict(_meta(config, counts)), indent=1))
            unfinished.rename(folder)
    finally:
        # What went wrong before a shard was finished leaves nothing.
        with suppress(OSError):
            unfinished.rmdir()
    log.info(
        "prepared %d training and %d held-out tokens from %d + %d documents of %s",
        counts.train_tokens, counts.heldout_tokens, counts.train_documents, counts.heldout_documents, config.source,
    )  # fmt: skip


def _meta(config: DataConfig, counts: Counts) -> Meta:
    tokenizer = build_tokenizer(config.tokenizer)
    # The last training document is cut to give the number asked for; held-out ones stay whole for their bytes.
    train_tokens = min(counts.train_tokens, config.max_tokens or counts.train_tokens)
    return Meta(
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=token_dtype(tokenizer),
        train_tokens=train_tokens,
        heldout_tokens=counts.heldout_tokens,
        heldout_bytes=counts.heldout_bytes,
    )


def _require_both(config: DataConfig, counts: Counts) -> None:
    if counts.train_documents and counts.heldout_documents:
        return
    raise InputError(
        f"data.source={config.source}: {counts.train_documents} documents to train on and "
        f"{counts.heldout_documents} held out with data.heldout_fraction={config.heldout_fraction}; need at least one "
        "of each: give more documents (split a long text into several files, or into the rows of a .jsonl file) "
        f"or {'raise' if counts.train_documents else 'lower'} data.heldout_fraction"
    )


def _read_meta(folder: Path) -> Meta:
    try:
        meta = Meta(**json.loads((folder / META).read_bytes()))
        if meta.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype {meta.dtype!r}")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / META} is damaged ({error}); delete {folder}") from None
    return meta


def _open(folder: Path, meta: Meta, entry: tuple[str, float]) -> Text:
    return Text(
        train=open_split(folder, "train", meta.dtype, meta.train_tokens),
        heldout=open_split(folder, "heldout", meta.dtype, meta.heldout_tokens),
        heldout_bytes=meta.heldout_bytes,
        name=entry[0],
        weight=entry[1],
    )
