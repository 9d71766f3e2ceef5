"""A small text in many rows, and configs that read it in each way."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from inner.config import DataConfig
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus
from inner.data.streaming.index import ShardIndex
from inner.data.streaming.open import StreamOptions, open_streamed, shards_identity
from inner.data.streaming.publish import publish
from inner.data.streaming.store import Store

SEQ_LEN, SHARD_TOKENS = 16, 512
COMMAND = [sys.executable, "-m", "diloco.runtime.corpus", "1"]


def write_rows(folder: Path, count: int = 60, name: str = "a.jsonl") -> Path:
    """Rows of unequal length in a .jsonl file; about 150 tokens each."""
    folder.mkdir(exist_ok=True, parents=True)
    texts = [f"number {i} \u00e9\n" * (1 + i * 7 % 20) for i in range(count)]
    (folder / name).write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    return folder


def rows_config(folder: Path, **changes: object) -> DataConfig:
    values = {"source": "files", "paths": [str(folder)], "heldout_fraction": 0.2, "order": "shards"}
    return DataConfig.model_validate(
        values | {"seq_len": SEQ_LEN, "shard_tokens": SHARD_TOKENS} | changes
    )


def store_config(url: str, **changes: object) -> DataConfig:
    return rows_config(Path(), source="shards", paths=[url], **changes)


def options_of(**changes: object) -> StreamOptions:
    values = {"cache_bytes": None, "ahead": 1, "patience": 20.0, "command": COMMAND}
    return StreamOptions(**{**values, **changes})  # pyright: ignore


def published(config: DataConfig, url: str, processes: int = 1) -> ShardIndex:
    return publish(
        config, shards_identity(config), Store(url, 20.0), processes, lambda index, share: None
    )


@contextmanager
def opened(config: DataConfig, cache: Path, **changes: object) -> Iterator[Corpus]:
    corpus = open_streamed(config, cache, options_of(**changes))
    try:
        yield corpus
    finally:
        corpus.close()


def batches_of(corpus: Corpus, seed: int = 0) -> IslandBatches:
    return IslandBatches(corpus, SEQ_LEN, seed, 1, 8)


def read_units(corpus: Corpus, units: range) -> torch.Tensor:
    """All sequences of some units, of 8 sequences each."""
    batches = batches_of(corpus)
    return torch.cat([batch for unit in units for batch in batches.micro_batches(unit, 0, 1, 8)])
