"""Stages of the reading order: no sequence is read again when mixture, length or batch change."""

from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from diloco.config.schema import RunConfig, at_stage, count_inner_steps, stage_rounds, stage_tokens
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus, Text
from inner.data.stages import StageReading, find_stage_start

BLOCKS, LONGEST = 64, 16
STAGES = [
    StageReading((3.0, 1.0), 8, 4),
    StageReading((1.0, 1.0), 16, 2),
    StageReading((0.0, 1.0), 4, 8),
]
BORDERS = [(10, 100), (105, 200)]
"""(First unit that is not read, first unit of the next stage)."""


def corpus_of(weights: tuple[float, ...], shard_tokens: int | None = None) -> Corpus:
    """Token i of source s is 10,000 s + i. `shard_tokens`: those within which sequences are
    shuffled.
    """
    texts = [
        Text(
            np.arange(BLOCKS * LONGEST + 1, dtype=np.uint16) + 10_000 * s,
            np.arange(9, dtype=np.uint16),
            1,
            str(s),
            w,
        )
        for s, w in enumerate(weights)
    ]
    return Corpus(tuple(texts), 1 << 16, 0, shard_tokens)


def read_stage(number: int, first: int, end: int, shard_tokens: int | None) -> list[int]:
    """The targets of the units from `first` to `end` in a stage."""
    stage = STAGES[number]
    start = find_stage_start(STAGES, BORDERS[:number], seed=3)
    assert start.unit == (0, 100, 200)[number]
    size = stage.sequences_per_step
    batches = IslandBatches(
        corpus_of(stage.weights, shard_tokens), stage.seq_len, 3, 1, size, start
    )
    return [
        token
        for unit in range(first, end)
        for token in batches.micro_batches(unit, 0, 1, size)[0][:, 1:].flatten().tolist()
    ]


@pytest.mark.parametrize("shard_tokens", [None, 4 * LONGEST], ids=["global", "shards"])
def test_stages_of_other_lengths_weights_and_batches_read_nothing_twice(
    shard_tokens: int | None,
) -> None:
    units = ((0, 10), (100, 105), (200, 205))
    read = [read_stage(number, *each, shard_tokens) for number, each in enumerate(units)]
    found = Counter(token for tokens in read for token in tokens)
    assert max(found.values()) == 1
    assert {token // 10_000 for token in read[2]} == {1}, "a weight of 0 leaves a source out"
    share = sum(token < 10_000 for token in read[1]) / len(read[1])
    assert 0.3 < share < 0.7


def test_a_stage_of_the_same_text_goes_on_where_the_stage_before_ended() -> None:
    stages = [StageReading((1.0,), 8, 4), StageReading((1.0,), 8, 2)]
    start = find_stage_start(stages, [(3, 50)], seed=3)
    after = IslandBatches(corpus_of((1.0,)), 8, 3, 1, 2, start)
    whole = IslandBatches(corpus_of((1.0,)), 8, 3, 1, 2)
    assert (
        after.micro_batches(50, 0, 1, 2)[0].tolist() == whole.micro_batches(6, 0, 1, 2)[0].tolist()
    )
    with pytest.raises(AssertionError, match="belongs to an earlier stage"):
        after.micro_batches(49, 0, 1, 2)


MIXTURE = [{"name": "a", "weight": 1.0}, {"name": "b", "weight": 1.0}]


IN_SHARDS = {"seq_len": 32, "order": "shards", "shard_tokens": 96}
CHAT = {"source": "files", "format": "chat", "seq_len": 32}


def run_of(*stages: dict, **more: dict) -> RunConfig:
    values = {
        "data": {"mixture": MIXTURE, "seq_len": 32},
        "optimizer": {"tokens_per_step": 64},
        "outer": {"rounds": 10, "inner_steps": 5, "start_islands": 2, "fragments": 2},
        "stages": list(stages),
    }
    return RunConfig.model_validate(values | more)


def test_stages_begin_with_whole_cycles() -> None:
    run = run_of(
        {"tokens": 1300},
        {"tokens": 1, "tokens_per_step": 128, "lr": 0.5},
        {"seq_len": 16, "weights": {"b": 3}},
    )
    assert stage_rounds(run) == (6, 8), "1300 tokens are 2.03 cycles of 640, of two rounds each"
    second, third = at_stage(run, 1), at_stage(run, 2)
    assert (second.optimizer.lr, second.optimizer.tokens_per_step, second.data.seq_len) == (
        0.5,
        128,
        32,
    )
    assert ([entry.weight for entry in third.data.mixture], third.data.seq_len) == ([1, 3], 16)
    assert run.hash != run_of().hash


def test_with_a_quorum_stages_begin_with_the_tokens_of_the_same_cycles() -> None:
    run = run_of({"tokens": 1300}, {"tokens": 1, "tokens_per_step": 128}, {"tokens_per_step": 32})
    assert stage_tokens(run) == (3 * 640, 3 * 640 + 1280)
    assert run.total_tokens == 3 * 640 + 1280 + 6 * 320
    steps = {
        0: 0,
        128: 1,
        1919: 14,
        1920: 15,
        1920 + 255: 15,
        1920 + 256: 16,
        3200: 20,
        3264: 21,
        5120: 50,
    }
    assert {tokens: count_inner_steps(run, tokens) for tokens in steps} == steps


@pytest.mark.parametrize(
    "stages, more, text",
    [
        ([{}, {}], {}, r"stages\[0\].tokens is not set"),
        ([{"tokens": 5}], {}, r"stages\[0\].tokens is set in the last stage"),
        ([{"weights": {"c": 1}}], {}, "got c; the run has a, b"),
        ([{"weights": {"a": -1}}], {}, "a weight is 0 or more"),
        ([{"weights": {"a": 0, "b": 0}}], {}, "leave no source to read"),
        ([{"seq_len": 24}], {}, "not a whole number of sequences of 24"),
        (
            [{"tokens": 1, "seq_len": 8}, {"seq_len": 12, "tokens_per_step": 48}],
            {},
            "does not divide the longest",
        ),
        ([{"tokens": 10**6}, {}], {}, "raise outer.rounds"),
        (
            [{"seq_len": 64}],
            {"data": IN_SHARDS},
            "which is not a multiple of 64, the longest.*such as 64 or 128",
        ),
        (
            [{"seq_len": 16}],
            {"data": CHAT},
            "conversations are packed for one sequence length only",
        ),
        ([{}], {"outer": {"gossip": {}}}, "outer has gossip"),
    ],
)
def test_stages_that_cannot_be_followed_are_refused(
    stages: list[dict], more: dict, text: str
) -> None:
    with pytest.raises(ValidationError, match=text):
        run_of(*stages, **more)
