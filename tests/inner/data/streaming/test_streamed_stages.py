"""Stages of a run whose text comes in shards: what each reads is the same in every way to read
them.
"""

from pathlib import Path

import pytest
import torch

from inner.config import DataConfig
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus, prepare_corpus
from inner.data.stages import StageReading, find_stage_start
from tests.inner.data.streaming.texts import (
    SHARD_TOKENS,
    opened,
    published,
    rows_config,
    store_config,
    write_rows,
)

STAGES = [StageReading((1.0,), 16, 8), StageReading((1.0,), 64, 4), StageReading((1.0,), 32, 4)]
BORDERS = [(5, 40), (44, 90)]
"""(First unit that is not read, first unit of the next stage)."""
UNITS = (range(5), range(40, 44), range(90, 100))


def read_stages(corpus: Corpus) -> list[torch.Tensor]:
    """All sequences of some units of each stage; those of the last one are of two epochs."""
    read = []
    for number, (stage, units) in enumerate(zip(STAGES, UNITS, strict=True)):
        start = find_stage_start(STAGES, BORDERS[:number], seed=3)
        size = stage.sequences_per_step
        batches = IslandBatches(corpus, stage.seq_len, 3, 1, size, start)
        read.append(
            torch.cat([each for unit in units for each in batches.micro_batches(unit, 0, 1, size)])
        )
    return read


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return rows_config(write_rows(tmp_path / "text", count=20), seq_len=64)


def test_stages_read_the_same_from_a_tokeniser_a_store_and_the_whole_text(
    tmp_path: Path, config: DataConfig
) -> None:
    (text,) = prepare_corpus(config, tmp_path / "whole").texts
    whole = read_stages(Corpus((text,), 260, 256, SHARD_TOKENS))
    with opened(config, tmp_path / "cache") as corpus:
        streamed = read_stages(corpus)
    url = str(tmp_path / "store")
    published(config, url)
    with opened(store_config(url, seq_len=64), tmp_path / "fetched") as corpus:
        fetched = read_stages(corpus)
    for ways in zip(whole, streamed, fetched, strict=True):
        assert torch.equal(ways[0], ways[1]) and torch.equal(ways[0], ways[2])
