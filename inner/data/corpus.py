"""Text, tokenised once: two token files that every later run and every rank maps into memory."""

import hashlib
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from inner.config import DataConfig
from inner.data.documents import Document
from inner.data.sources import build_source
from inner.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_fingerprint
from inner.errors import InputError

log = logging.getLogger(__name__)

FORMAT = 2
"""Part of the cache key: raise it when the same config would give other tokens."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids, 1-D uint16 or uint32, every document ended by eos; held-out documents are never in train."""

    train: np.ndarray
    heldout: np.ndarray
    vocab_size: int
    eos_id: int
    heldout_bytes: int
    """UTF-8 bytes of the text behind all held-out tokens, for bits per byte."""


@dataclass
class Split:
    """One token file while it is written."""

    file: BinaryIO
    limit_tokens: float
    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.num_tokens >= self.limit_tokens


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
    """Return if the tokenizer loads and the source gives a first document; InputError says what is missing."""
    build_tokenizer(config.tokenizer)
    next(build_source(config).documents())


def prepare_corpus(config: DataConfig, cache_dir: Path) -> Corpus:
    """The corpus of `config`, from `cache_dir` or read and tokenised now. Several processes may prepare at once."""
    folder = cache_dir / _cache_key(config)
    if not folder.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _published_folder(folder) as unfinished:
            _write_corpus(config, unfinished)
    return _open_corpus(folder)


def is_heldout(key: str, heldout_fraction: float) -> bool:
    """Whether a document is held out: decided by its key alone, so the same on every machine and in every run."""
    value = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")
    return value / 2**64 < heldout_fraction


def _cache_key(config: DataConfig) -> str:
    # Left out: what the token files do not depend on.
    parts = [
        FORMAT,
        config.model_dump(mode="json", exclude={"seq_len", "document_mask"}),
        build_source(config).fingerprint(),
        tokenizer_fingerprint(config.tokenizer),
    ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{config.source}-{digest[:16]}"


@contextmanager
def _published_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that becomes `folder` in one move, or vanishes if writing fails."""
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        yield unfinished
        unfinished.rename(folder)
    except OSError:
        # Another process was first: its files are as good as ours.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_corpus(config: DataConfig, folder: Path) -> None:
    tokenizer = build_tokenizer(config.tokenizer)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    train_limit, heldout_limit = math.inf, math.inf
    if config.max_tokens is not None:
        train_limit, heldout_limit = config.max_tokens, config.max_tokens * config.heldout_fraction
    with (folder / "train.bin").open("wb") as train_file, (folder / "heldout.bin").open("wb") as heldout_file:
        train, heldout = Split(train_file, train_limit), Split(heldout_file, heldout_limit)
        for document in build_source(config).documents():
            if is_heldout(document.key, config.heldout_fraction):
                _append(heldout, document, tokenizer, dtype)
            else:
                _append(train, document, tokenizer, dtype)
            if train.is_full and heldout.is_full:
                break
    _require_both(config, train, heldout)
    # The last training document is cut to give the number asked for; held-out ones stay whole for their bytes.
    train_tokens = int(min(train.num_tokens, train_limit))
    meta = Meta(tokenizer.vocab_size, tokenizer.eos_id, dtype, train_tokens, heldout.num_tokens, heldout.num_bytes)
    (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=1))
    log.info(
        "prepared %d training and %d held-out tokens from %d + %d documents of %s",
        train_tokens, heldout.num_tokens, train.num_documents, heldout.num_documents, config.source,
    )  # fmt: skip


def _append(split: Split, document: Document, tokenizer: Tokenizer, dtype: str) -> None:
    if split.is_full:
        return
    ids = np.append(tokenizer.encode(document.text), np.uint32(tokenizer.eos_id))
    split.file.write(ids.astype(dtype).tobytes())
    split.num_documents += 1
    split.num_tokens += len(ids)
    split.num_bytes += len(document.text.encode("utf-8", "replace"))


def _require_both(config: DataConfig, train: Split, heldout: Split) -> None:
    if train.num_documents and heldout.num_documents:
        return
    raise InputError(
        f"data.source={config.source}: {train.num_documents} documents to train on and "
        f"{heldout.num_documents} held out with data.heldout_fraction={config.heldout_fraction}; need at least one "
        "of each: give more documents (split a long text into several files, or into the rows of a .jsonl file) "
        f"or {'raise' if train.num_documents else 'lower'} data.heldout_fraction"
    )


def _open_corpus(folder: Path) -> Corpus:
    meta = Meta(**json.loads((folder / "meta.json").read_text()))
    return Corpus(
        train=_map_tokens(folder / "train.bin", meta.dtype, meta.train_tokens),
        heldout=_map_tokens(folder / "heldout.bin", meta.dtype, meta.heldout_tokens),
        vocab_size=meta.vocab_size,
        eos_id=meta.eos_id,
        heldout_bytes=meta.heldout_bytes,
    )


def _map_tokens(path: Path, dtype: str, num_tokens: int) -> np.ndarray:
    needed = num_tokens * np.dtype(dtype).itemsize
    size = path.stat().st_size
    if size < needed:
        raise InputError(f"{path}: {size} bytes, needs {needed}: the file is damaged; delete {path.parent}")
    return np.memmap(path, dtype=dtype, mode="r", shape=(num_tokens,))
