"""Training batches. The sequences of each unit follow from the seed alone, so there is no state to
save or restore.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch

from inner.data.corpus import Corpus, Text
from inner.data.micro_batch import IGNORE_INDEX
from inner.data.mixture import (
    MixedOrder,
    MixturePosition,
    MixtureShares,
    Sequences,
    StreamedTokens,
    WholeText,
)
from inner.data.shards import Tokens
from inner.data.stages import BlockOrder, OwnedSource, SiteOrder, StageStart
from inner.errors import InputError

EXPECT_SECONDS = 1.0
"""Shortest time in seconds between two looks at the sequences that come next."""
EXPECT_UNITS = 1024
"""Largest number of coming units that are looked at."""
FROM_THE_START = StageStart()


@dataclass(frozen=True)
class StepBatch:
    """The sequences that a rank trains on in one inner step."""

    micro_batches: list[torch.Tensor]
    """Each micro-batch is int64 [micro_batch, seq_len + 1] on the CPU."""
    source_tokens: dict[str, int]
    """Number of tokens that all ranks together read from each source; empty without a mixture."""
    seconds: float
    """Time spent reading on this rank."""


class IslandBatches:
    """The training text cut into units; an island reads one unit in each inner step.

    Unit u holds the positions [u, u + 1) x sequences_per_step of the reading order. While n islands
    step together, island i reads unit s*n + i in step s:

        step    island 0    island 1    island 2
           0    unit 0      unit 1      unit 2
           1    unit 3      unit 4      unit 5

    A single island with n times the sequences_per_step therefore reads the same sequences in every
    step.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        seed: int,
        num_islands: int,
        sequences_per_step: int,
        start: StageStart = FROM_THE_START,
    ) -> None:
        """Build the units of a text. `start` is the place at which a stage of the run begins to
        read.
        """
        self._texts = corpus.texts
        self._seq_len = seq_len
        self._first_unit = start.unit
        block_len = start.block_len or seq_len
        self._per_block = block_len // seq_len
        self._begun = start.blocks or (0,) * len(corpus.texts)
        self._blocks = [
            _cut(text, block_len, seed, corpus.shuffled_tokens) for text in corpus.texts
        ]
        orders = [
            BlockOrder(blocks.order, begun, self._per_block)
            for blocks, begun in zip(self._blocks, self._begun, strict=True)
        ]
        self._shared_weights = [0.0 if text.reader else text.weight for text in corpus.texts]
        self._order = MixedOrder(self._shared_weights, orders, seed)
        own = [
            OwnedSource(number, orders[number], text.reader)
            for number, text in enumerate(corpus.texts)
            if text.reader
        ]
        weights = [*(corpus.weights[source.number] for source in own), sum(self._shared_weights)]
        self._site = SiteOrder(own, weights, self._order, sequences_per_step) if own else None
        """The reading order of an island with sources of its own: these together with the shared
        ones. None without such sources."""
        self._num_islands = num_islands
        self._sequences_per_step = sequences_per_step
        self.is_streamed = any(isinstance(text.train, StreamedTokens) for text in corpus.texts)
        """Whether text may still have to be fetched or tokenised, so that reading it waits."""
        self._expected_at = -EXPECT_SECONDS
        self._require_one_step()

    def micro_batches(
        self, unit: int, data_rank: int, num_data_ranks: int, micro_batch: int, number: int = 0
    ) -> list[torch.Tensor]:
        """Return this rank's micro-batches of a unit (counted from 0), each int64 [micro_batch,
        seq_len + 1] on the CPU.

        If the island has sources of its own, `number` is the number of units that it read
        before this one.
        """
        per_rank = self._sequences_per_step // num_data_ranks
        if per_rank * num_data_ranks != self._sequences_per_step or per_rank % micro_batch:
            raise InputError(
                f"{self._sequences_per_step} sequences per step do not divide into "
                f"{num_data_ranks} data ranks with "
                f"micro-batches of {micro_batch}; make tokens_per_step a multiple of "
                f"{self._seq_len * num_data_ranks * micro_batch} (seq_len x data ranks x "
                "micro-batch)"
            )
        if self._site is not None:
            self._site.enter(unit, number)
        first = self._position(unit) + data_rank * per_rank
        starts = range(first, first + per_rank, micro_batch)
        return [self._read(range(start, start + micro_batch)) for start in starts]

    def read_step(
        self, unit: int, data_rank: int, num_data_ranks: int, micro_batch: int, number: int = 0
    ) -> StepBatch:
        """Read this rank's share of a unit for one inner step, and time the reading. `number`: as
        in micro_batches.
        """
        started_at = time.perf_counter()
        micro_batches = self.micro_batches(unit, data_rank, num_data_ranks, micro_batch, number)
        seconds = time.perf_counter() - started_at
        return StepBatch(
            micro_batches, self.tokens_by_source(unit) if len(self._texts) > 1 else {}, seconds
        )

    def expect(self, units: Iterable[range]) -> None:
        """Announce the units that will be read soon, in order, so that their text can be fetched.
        Call it before each step.
        """
        if not self.is_streamed or time.monotonic() - self._expected_at < EXPECT_SECONDS:
            return
        self._expected_at = time.monotonic()
        for source, blocks in enumerate(self._blocks):
            begun = self._begun[source]
            per_block = self._per_block
            read = self._positions(source, units)
            blocks.expect(
                range(begun + r.start // per_block, begun - (-r.stop // per_block)) for r in read
            )

    def _positions(self, source: int, units: Iterable[range]) -> Iterator[range]:
        """Yield the positions in the reading order of a source that the units read, in order. In a
        mixture, a few more positions may be included.
        """
        for unit in islice(chain.from_iterable(units), EXPECT_UNITS):
            first = self._position(unit)
            end = first + self._sequences_per_step
            yield (
                range(first, end)
                if len(self._texts) == 1
                else self._order.bounds(source, first, end)
            )

    def tokens_by_source(self, unit: int) -> dict[str, int]:
        """Return the number of tokens of each source in a unit. If the island has sources of its
        own, it counts the unit that was read last.
        """
        numbers = (
            self._count_sources(unit)
            if self._site is None
            else self._site.count_sources(len(self._texts))
        )
        return {
            text.name: number * self._seq_len
            for text, number in zip(self._texts, numbers, strict=True)
        }

    def _count_sources(self, unit: int) -> list[int]:
        first = self._position(unit)
        before = self._order.counts(first)
        after = self._order.counts(first + self._sequences_per_step)
        return [new - old for old, new in zip(before, after, strict=True)]

    def _position(self, unit: int) -> int:
        """Return the position of the unit's first sequence in the reading order of the stage."""
        assert unit >= self._first_unit, (
            f"unit {unit} belongs to an earlier stage; this stage begins with unit "
            f"{self._first_unit}"
        )
        return (unit - self._first_unit) * self._sequences_per_step

    def _read(self, positions: range) -> torch.Tensor:
        order = self._order if self._site is None else self._site
        return torch.stack([self._window(order[position]) for position in positions])

    def _window(self, place: MixturePosition) -> torch.Tensor:
        block, inside = divmod(place.sequence, self._per_block)
        first = inside * self._seq_len
        return _to_tensor(
            self._blocks[place.source].window(block)[first : first + self._seq_len + 1]
        )

    def _require_one_step(self) -> None:
        read = self._num_islands * self._sequences_per_step
        shares = MixtureShares(self._shared_weights).counts(read)
        for text, blocks, needed in zip(self._texts, self._blocks, shares, strict=True):
            if blocks.number is not None and (number := blocks.number * self._per_block) < needed:
                raise InputError(
                    f"the training text{_name_of(text)} has {number} sequences of {self._seq_len} "
                    f"tokens, but one step reads {needed} ({self._num_islands} islands x "
                    f"{self._sequences_per_step}); give more text, raise data.max_tokens, or lower "
                    "tokens_per_step or seq_len"
                )


def heldout_windows(
    corpus: Corpus,
    seq_len: int,
    num_tokens: int,
    data_rank: int,
    num_data_ranks: int,
    micro_batch: int,
) -> Iterator[torch.Tensor]:
    """Yield this rank's held-out windows, int64 [micro_batch, seq_len + 1] on the CPU, padded with
    rows of -100.

    On any mesh, all ranks together read the first num_tokens targets, rounded up to whole windows
    and limited by the length of the text. Every rank yields the same number of batches, because a
    sharded forward pass needs all ranks. Sources are mixed in the same proportions as in training.
    """
    shares = MixtureShares(corpus.weights)
    num_windows = sum(heldout_counts(corpus, seq_len, num_tokens))
    num_micro_batches = -(-num_windows // (num_data_ranks * micro_batch))
    first = data_rank * num_micro_batches * micro_batch
    for start in range(first, first + num_micro_batches * micro_batch, micro_batch):
        batch = torch.full((micro_batch, seq_len + 1), IGNORE_INDEX, dtype=torch.int64)
        for row, index in enumerate(range(start, min(start + micro_batch, num_windows))):
            place = shares.locate(index)
            batch[row] = _window(corpus.texts[place.source].heldout, place.sequence, seq_len)
        yield batch


def heldout_counts(corpus: Corpus, seq_len: int, num_tokens: int) -> tuple[int, ...]:
    """Return the number of windows of each source that an evaluation on `num_tokens` targets reads.

    The numbers have the proportions of the mixture, and may be 0 for a source with a small weight.
    """
    shares = MixtureShares(corpus.weights)
    available = shares.max_positions(
        [_num_windows(text, text.heldout, seq_len, "held-out") for text in corpus.texts]
    )
    return shares.counts(min(available, -(-num_tokens // seq_len)))


def _window(tokens: Tokens, index: int, seq_len: int) -> torch.Tensor:
    return _to_tensor(tokens[index * seq_len : (index + 1) * seq_len + 1])


def _to_tensor(window: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(window.astype(np.int64))


def _cut(text: Text, seq_len: int, seed: int, shuffled_tokens: int | None) -> Sequences:
    if isinstance(text.train, StreamedTokens):
        return text.train.cut(seq_len, seed)
    _num_windows(text, text.train, seq_len, "training")
    return WholeText(text.train, seq_len, seed, shuffled_tokens)


def _num_windows(text: Text, tokens: Tokens, seq_len: int, split: str) -> int:
    num_windows = (len(tokens) - 1) // seq_len
    if num_windows < 1:
        raise InputError(
            f"the {split} text{_name_of(text)} has {len(tokens)} tokens, but one window needs "
            f"{seq_len + 1} (data.seq_len + 1); give more text, raise data.max_tokens or "
            "data.heldout_fraction, or lower data.seq_len"
        )
    return num_windows


def _name_of(text: Text) -> str:
    """Return a suffix that names the source in an error; empty without a mixture."""
    return f" of {text.name!r}" if text.name else ""
