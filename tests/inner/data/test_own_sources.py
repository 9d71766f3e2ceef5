"""Sources that only some islands read: fixed shares, each sequence once an epoch, and the same text
for all others.
"""

from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from diloco.config.island import IslandConfig
from diloco.config.schema import RunConfig
from diloco.errors import ConfigError
from diloco.runtime.corpus import data_of
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus, Text

SEQ_LEN, SIZE = 4, 8


def text(
    number: int, name: str, windows: int, weight: float, reader: tuple[int, int] | None = None
) -> Text:
    """Token i of the text is 10,000 x its number + i."""
    train = np.arange(windows * SEQ_LEN + 1, dtype=np.uint16) + 10_000 * number
    return Text(train, train[:9], 1, name, weight, reader)


def batches_of(*texts: Text) -> IslandBatches:
    return IslandBatches(Corpus(texts, 1 << 16, 0), SEQ_LEN, 0, 2, SIZE)


def read(batches: IslandBatches, unit: int, number: int) -> list[tuple[int, int]]:
    """(source, sequence) of each sequence of a unit that is the island's `number`-th."""
    (batch,) = batches.micro_batches(unit, 0, 1, SIZE, number)
    return [(int(row[0]) // 10_000, int(row[0]) % 10_000 // SEQ_LEN) for row in batch]


SHARED = text(0, "shared", 500, 3.0), text(2, "more", 500, 1.0)


def test_an_island_reads_its_own_source_in_its_share_and_each_sequence_once_an_epoch() -> None:
    batches = batches_of(SHARED[0], text(1, "own", 40, 1.0, (0, 1)), SHARED[1])
    found = [read(batches, 2 * number, number) for number in range(20)]
    own = [sequence for rows in found for source, sequence in rows if source == 1]
    assert len(own) == 20 * SIZE // 5, "1 of 1 + 3 + 1"
    assert max(Counter(own).values()) == 1
    assert batches.tokens_by_source(38)["own"] in (SEQ_LEN, 2 * SEQ_LEN)


def test_what_it_reads_of_the_others_are_sequences_of_the_leased_unit() -> None:
    with_own = batches_of(SHARED[0], text(1, "own", 40, 1.0, (0, 1)), SHARED[1])
    without = batches_of(*SHARED)
    for number, unit in enumerate((0, 3, 4, 9)):
        rows = [row for row in read(with_own, unit, number) if row[0] != 1]
        assert rows == read(without, unit, 0)[: len(rows)]


def test_two_islands_share_a_source_of_theirs_without_reading_a_sequence_twice() -> None:
    places = [
        batches_of(SHARED[0], text(1, "own", 64, 1.0, (place, 2)), SHARED[1]) for place in (0, 1)
    ]
    own = [
        row
        for number in range(16)
        for each in places
        for row in read(each, number, number)
        if row[0] == 1
    ]
    assert len(own) > 40 and max(Counter(own).values()) == 1


def test_an_island_may_have_nothing_but_its_own_sources() -> None:
    batches = batches_of(text(1, "own", 64, 1.0, (0, 1)))
    assert {row[0] for number in range(4) for row in read(batches, 5 * number, number)} == {1}


MIXTURE = [
    {"name": "shared"},
    {"name": "own", "paths": ["x"], "source": "files", "only": ["a", "b"]},
]


def run_of(mixture: list[dict], **more: list[dict]) -> RunConfig:
    return RunConfig.model_validate(
        {"data": {"mixture": [{"weight": 1} | entry for entry in mixture]}} | more
    )


@pytest.mark.parametrize("label, names", [("a", ["shared", "own"]), ("c", ["shared"])])
def test_only_named_islands_have_the_source_in_their_config(label: str, names: list[str]) -> None:
    assert [
        entry.name for entry in data_of(run_of(MIXTURE), IslandConfig(name=label)).mixture
    ] == names


def test_an_island_without_any_source_and_stages_beside_own_sources_are_refused() -> None:
    with pytest.raises(ConfigError, match="island 'c' has no source"):
        data_of(run_of(MIXTURE[1:]), IslandConfig(name="c"))
    with pytest.raises(ValidationError, match="all islands can read shards from a store"):
        RunConfig.model_validate(
            {"data": {"order": "shards", "mixture": [{"weight": 1, **MIXTURE[1]}]}}
        )
    with pytest.raises(ValidationError, match="that only some islands read"):
        run_of(MIXTURE, stages=[{}])
