"""Mixtures: shares of sources, reproducibility, random access, and each sequence once per epoch."""

import math
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from inner.config import DataConfig
from inner.data.batches import IslandBatches, heldout_windows
from inner.data.corpus import Corpus, Text, prepare_corpus
from inner.data.mixture import BLOCK, MixedOrder, MixturePosition, MixtureShares, SequenceOrder
from inner.errors import InputError

SEQ_LEN = 4
WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def mixed_order(weights: list[float], seed: int = 3, num_sequences: int = 50) -> MixedOrder:
    return MixedOrder(weights, [SequenceOrder(num_sequences, seed) for _ in weights], seed)


def corpus_of(weights: list[float], train_windows: list[int], heldout_windows: list[int]) -> Corpus:
    """A corpus in which token i of source s is 1000 s + i."""
    texts = [
        Text(row(1000 * s, train), row(1000 * s, held), held * SEQ_LEN + 1, f"source-{s}", weight)
        for s, (weight, train, held) in enumerate(
            zip(weights, train_windows, heldout_windows, strict=True)
        )
    ]
    return Corpus(tuple(texts), vocab_size=1 << 16, eos_id=0)


def row(first: int, windows: int) -> np.ndarray:
    return np.arange(first, first + windows * SEQ_LEN + 1, dtype=np.uint16)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_an_epoch_visits_each_sequence_once(size: int, seed: int, epoch: int) -> None:
    order = SequenceOrder(size, seed)
    assert sorted(order[epoch * size + index] for index in range(size)) == list(range(size))


def test_an_order_of_as_many_sequences_as_there_may_ever_be_takes_no_memory() -> None:
    order = SequenceOrder(10**15, seed=1)
    read = [order[position] for position in range(1000)]
    assert len(set(read)) == 1000
    assert all(0.2 < np.mean(np.array(read) < 10**15 * share) / share < 1.8 for share in (0.1, 0.5))


def test_all_orders_of_a_few_sequences_are_equally_frequent() -> None:
    size, num_draws = 4, 2400
    found = Counter(
        tuple(SequenceOrder(size, seed)[index] for index in range(size))
        for seed in range(num_draws)
    )
    expected = num_draws / math.factorial(size)
    chi_squared = sum(
        (found[order] - expected) ** 2 / expected for order in permutations(range(size))
    )
    assert chi_squared < 45, "of 23 degrees of freedom: four standard deviations above the mean"


def test_neighbours_in_the_order_are_not_neighbours_in_the_text() -> None:
    size = 1000
    orders = np.array(
        [[SequenceOrder(size, seed)[index] for index in range(size)] for seed in range(10)]
    )
    steps = np.diff(orders) % size
    assert 5 < sum(np.isin(steps, (1, size - 1)).sum(axis=1)) < 40, (
        "two in each of ten random orders"
    )
    assert len(np.unique(steps)) > 0.99 * size
    correlations = [np.corrcoef(np.arange(size), order)[0, 1] for order in orders]
    assert np.abs(correlations).max() < 4 / math.sqrt(size)


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01]])
def test_realised_shares_are_within_one_percent_after_100k_draws(weights: list[float]) -> None:
    order = mixed_order(weights)
    read = Counter(order[position].source for position in range(100_000))
    for source, weight in enumerate(weights):
        assert (
            abs(read[source] / 100_000 - weight / sum(weights))
            <= 0.01 * weight / sum(weights) + 1e-5
        )


@given(weights=WEIGHTS, n=st.integers(0, 10**12), more=st.integers(0, 3000))
@settings(deadline=None)
def test_counts_add_up_never_fall_and_stay_near_the_weights(
    weights: list[float], n: int, more: int
) -> None:
    shares = MixtureShares(weights)
    before, after = shares.counts(n), shares.counts(n + more)
    assert sum(before) == n
    assert all(old <= new for old, new in zip(before, after, strict=True))
    wanted = [n * weight / sum(weights) for weight in weights]
    assert all(
        abs(got - want) <= len(weights) + 1e-3 for got, want in zip(before, wanted, strict=True)
    )


@given(weights=WEIGHTS, start=st.integers(0, 10**9), seed=st.integers(0, 2**63))
@settings(max_examples=30, deadline=None)
def test_random_access_reads_the_same_as_reading_in_order(
    weights: list[float], start: int, seed: int
) -> None:
    positions = range(start, start + BLOCK + 100, 97)
    walked = {position: mixed_order(weights, seed)[position] for position in positions}
    jumping = mixed_order(weights, seed)
    assert {position: jumping[position] for position in reversed(positions)} == walked


@given(weights=WEIGHTS, start=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_counts_of_positions_are_those_that_were_read(weights: list[float], start: int) -> None:
    order = mixed_order(weights)
    read = Counter(order[position].source for position in range(start, start + 500))
    before, after = order.counts(start), order.counts(start + 500)
    assert [new - old for old, new in zip(before, after, strict=True)] == [
        read[s] for s in range(len(weights))
    ]


def test_each_source_is_read_once_per_epoch_in_its_own_shuffled_order() -> None:
    order = mixed_order([0.8, 0.2], num_sequences=50)
    places = [order[position] for position in range(3 * BLOCK)]
    for source in (0, 1):
        read = [place.sequence for place in places if place.source == source]
        own = SequenceOrder(50, 3)
        assert read == [own[i] for i in range(len(read))]
        assert all(
            sorted(read[i : i + 50]) == list(range(50)) for i in range(0, len(read) // 50 * 50, 50)
        )


def test_a_single_source_keeps_its_own_order() -> None:
    own = SequenceOrder(70, 3)
    assert [mixed_order([0.3], num_sequences=70)[p] for p in (0, 1, 99, 5000)] == [
        MixturePosition(0, own[p]) for p in (0, 1, 99, 5000)
    ]


def test_the_mixture_is_the_same_on_every_machine() -> None:
    order = mixed_order([3, 1], seed=42)
    assert [order[p].source for p in range(20)] == [
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        1,
        1,
        0,
        0,
        1,
        0,
        0,
        0,
        1,
        0,
        0,
    ]


def test_sources_do_not_alternate() -> None:
    order = mixed_order([1, 1])
    sources = [order[position].source for position in range(BLOCK)]
    assert 400 < sum(a == b for a, b in pairwise(sources)) < 624


def test_windows_come_from_the_source_of_their_position_and_are_counted_by_it() -> None:
    batches = IslandBatches(corpus_of([2, 1], [40, 40], [1, 1]), SEQ_LEN, 0, 2, 8)
    for step in range(5):
        rows = np.concatenate([batch.numpy() for batch in batches.micro_batches(step, 0, 1, 2)])
        assert (np.diff(rows) == 1).all()
        read = Counter(f"source-{first // 1000}" for first in rows[:, 0].tolist())
        assert {name: number * SEQ_LEN for name, number in read.items()} == {
            name: number for name, number in batches.tokens_by_source(step).items() if number
        }


def test_heldout_windows_have_the_shares_of_the_weights_and_end_with_the_scarcest() -> None:
    corpus = corpus_of([3, 1], [9, 9], [30, 2])
    firsts = [int(window[0, 0]) for window in heldout_windows(corpus, SEQ_LEN, 10**6, 0, 1, 1)]
    assert sorted(first // 1000 for first in firsts) == [0] * 6 + [1] * 2
    assert len(set(firsts)) == len(firsts)


def test_bits_per_byte_weighs_texts_as_the_loss_does() -> None:
    texts = tuple(
        Text(row(0, 1), np.zeros(n, np.uint16), b, str(n), w)
        for n, b, w in [(10, 40, 3), (100, 200, 1)]
    )
    assert Corpus(texts, 300, 0).heldout_tokens_per_byte == pytest.approx(1 / (0.75 * 4 + 0.25 * 2))


def test_a_source_too_short_for_its_share_of_a_step_is_named() -> None:
    with pytest.raises(
        InputError, match=r"training text of 'source-1' has 3 sequences of 4 tokens, .* reads 4 "
    ):
        IslandBatches(corpus_of([1, 1], [50, 3], [1, 1]), SEQ_LEN, 0, 2, 4)


def entry(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "weight": 1, "source": "files", **more}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mixture": [entry("a"), entry("a")]}, "mixture has 'a' 2 times"),
        (
            {"mixture": [entry("a")], "paths": ["x"], "max_tokens": 5},
            "move paths, max_tokens into its entries",
        ),
        ({"mixture": [entry("a", weight=0)]}, "greater than 0"),
    ],
)
def test_an_invalid_mixture_is_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(data)


def test_a_mixture_is_prepared_source_by_source(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number}\n" * 5)
    entries = [entry(name, paths=[str(tmp_path / name)]) for name in ("one", "two")]
    config = DataConfig.model_validate({"mixture": entries, "heldout_fraction": 0.2})
    corpus = prepare_corpus(config, tmp_path / "cache")
    alone = prepare_corpus(config.sources[1], tmp_path / "cache")
    assert [text.name for text in corpus.texts] == ["one", "two"]
    assert np.array_equal(corpus.texts[1].train[:], alone.texts[0].train[:])
