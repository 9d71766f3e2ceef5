"""Reading order of sequences over islands, ranks and micro-batches."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inner.data.batches import IslandBatches, heldout_windows
from inner.data.corpus import Corpus, Text
from inner.data.micro_batch import IGNORE_INDEX
from inner.data.mixture import SequenceOrder
from inner.errors import InputError

SEQ_LEN = 4


def corpus_of(train_windows: int, heldout_windows: int = 3) -> Corpus:
    """A corpus in which token i is i, so a window's first token divided by SEQ_LEN is its
    number.
    """
    train = np.arange(train_windows * SEQ_LEN + 1, dtype=np.uint16)
    heldout = np.arange(heldout_windows * SEQ_LEN + 1, dtype=np.uint16)
    return Corpus((Text(train, heldout, heldout_bytes=len(heldout)),), vocab_size=1 << 16, eos_id=0)


def numbers(windows: Sequence[torch.Tensor]) -> list[int]:
    return [int(row[0]) // SEQ_LEN for window in windows for row in window]


def unit_of(
    batches: IslandBatches, unit: int, num_data_ranks: int = 1, micro_batch: int = 1
) -> list[int]:
    ranks = [
        batches.micro_batches(unit, r, num_data_ranks, micro_batch) for r in range(num_data_ranks)
    ]
    return [number for rank in ranks for number in numbers(rank)]


@settings(max_examples=50, deadline=None)
@given(
    num_islands=st.integers(1, 4),
    ranks=st.integers(1, 3),
    micro_batch=st.integers(1, 3),
    accumulate=st.integers(1, 2),
    spare=st.integers(0, 7),
    step=st.integers(0, 9),
    seed=st.integers(0, 2**63),
)
def test_islands_together_read_what_one_data_parallel_run_reads(
    num_islands: int,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    spare: int,
    step: int,
    seed: int,
) -> None:
    per_island = ranks * micro_batch * accumulate
    corpus = corpus_of(num_islands * per_island + spare)
    batches = IslandBatches(corpus, SEQ_LEN, seed, num_islands, per_island)
    units = range(step * num_islands, (step + 1) * num_islands)
    together = [number for unit in units for number in unit_of(batches, unit, ranks, micro_batch)]
    alone = IslandBatches(corpus, SEQ_LEN, seed, 1, per_island * num_islands)
    assert together == unit_of(alone, step)


def test_an_epoch_of_two_islands_reads_every_sequence_once() -> None:
    batches = IslandBatches(corpus_of(24), SEQ_LEN, 7, 2, 4)
    read = [number for unit in range(6) for number in unit_of(batches, unit)]
    assert sorted(read) == list(range(24))
    assert read != list(range(24))


def test_every_window_is_a_run_of_the_training_text() -> None:
    batches = IslandBatches(corpus_of(8), SEQ_LEN, 0, 1, 4)
    for window in batches.micro_batches(0, 0, 1, 2):
        assert window.shape == (2, SEQ_LEN + 1)
        assert window.dtype == torch.int64
        assert torch.equal(window - window[:, :1], torch.arange(SEQ_LEN + 1).expand(2, -1))


def test_the_mesh_does_not_change_the_sequences_of_a_unit() -> None:
    batches = IslandBatches(corpus_of(40), SEQ_LEN, 3, 2, 12)
    assert unit_of(batches, 5, 1, 12) == unit_of(batches, 5, 3, 2) == unit_of(batches, 5, 12, 1)


def test_each_epoch_has_its_own_order() -> None:
    order = SequenceOrder(50, seed=1)
    epochs = [[order[epoch * 50 + i] for i in range(50)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]


def test_the_order_is_the_same_on_every_machine() -> None:
    order = SequenceOrder(10, seed=42)
    assert [order[i] for i in range(10)] == [7, 3, 5, 0, 8, 1, 9, 4, 6, 2]


def test_text_too_short_for_a_window_says_the_numbers() -> None:
    corpus = Corpus(
        (Text(np.arange(4, dtype=np.uint16), np.arange(9, dtype=np.uint16), 9),), 260, 257
    )
    with pytest.raises(InputError, match=r"training text has 4 tokens, but one window needs 5"):
        IslandBatches(corpus, SEQ_LEN, 0, 1, 1)


def test_text_too_short_for_a_step_says_the_numbers() -> None:
    with pytest.raises(
        InputError, match=r"10 sequences of 4 tokens, but one step reads 12 \(3 islands x 4\)"
    ):
        IslandBatches(corpus_of(10), SEQ_LEN, 0, 3, 4)


def test_a_step_that_does_not_divide_says_the_multiple() -> None:
    batches = IslandBatches(corpus_of(10), SEQ_LEN, 0, 1, 10)
    with pytest.raises(InputError, match=r"tokens_per_step a multiple of 16 "):
        batches.micro_batches(0, 0, 2, 2)


@given(
    ranks=st.integers(1, 5),
    micro_batch=st.integers(1, 5),
    tokens=st.integers(1, 60),
    held=st.integers(1, 12),
)
@settings(max_examples=50, deadline=None)
def test_every_mesh_evaluates_the_same_heldout_windows(
    ranks: int, micro_batch: int, tokens: int, held: int
) -> None:
    corpus = corpus_of(1, held)
    by_rank = [
        list(heldout_windows(corpus, SEQ_LEN, tokens, rank, ranks, micro_batch))
        for rank in range(ranks)
    ]
    rows = [row for windows in by_rank for window in windows for row in window.tolist()]
    expected = [
        list(range(i * SEQ_LEN, (i + 1) * SEQ_LEN + 1))
        for i in range(min(held, -(-tokens // SEQ_LEN)))
    ]
    assert [row for row in rows if row != [IGNORE_INDEX] * (SEQ_LEN + 1)] == expected
    assert {len(windows) for windows in by_rank} == {len(by_rank[0])}
    assert all(
        window.shape == (micro_batch, SEQ_LEN + 1) for windows in by_rank for window in windows
    )


def test_heldout_text_too_short_for_a_window_says_the_numbers() -> None:
    corpus = Corpus(
        (Text(np.arange(9, dtype=np.uint16), np.arange(2, dtype=np.uint16), 2),), 260, 257
    )
    with pytest.raises(InputError, match=r"held-out text has 2 tokens, but one window needs 5"):
        next(heldout_windows(corpus, SEQ_LEN, 100, 0, 1, 1))
