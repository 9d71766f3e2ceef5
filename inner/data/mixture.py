"""Reading order of one or several sources: it follows from weights, seed and position, so there is no state to save.

The order of a source is computed for each position, because an array of it may not fit into memory: 15T tokens are 1.8G
sequences of 8192. It consists of exact integers, so it is the same on every machine.

Positions are cut into blocks. How many of the first n positions belong to each source is rounded from the weights
alone (Shares), so it is known at every block boundary without counting. A seeded shuffle then assigns the positions
within a block. With weights 3 : 1 and blocks of 4:

    block        0           1           2
    source    0 1 0 0     0 0 0 1     1 0 0 0
    sequence  0 0 1 2     3 4 5 1     2 6 7 8       before the source's own shuffle
"""

import hashlib
import math
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from inner.data.shards import Tokens

BLOCK = 1024
"""Number of positions after which every source has received its share, to within a few sequences."""
READING_ORDER = 2
"""Version of the order: a checkpoint's account of the text counts positions in the order of the version it is from."""
FEISTEL_ROUNDS = 16
"""Luby and Rackoff (1988) prove four enough for large tables. With eight, orders of five sequences are not equally
frequent; with sixteen they are."""
WORD = (1 << 64) - 1


class SequenceOrder:
    """Infinite reading order of `num_sequences` sequences: every epoch visits each one once, in a new random order.

    >>> order = SequenceOrder(5, seed=0)
    >>> sorted(order[position] for position in range(5, 10))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        self._num_sequences = num_sequences
        self._seed = seed
        self._epoch = -1
        self._keys: tuple[int, ...] = ()

    def __getitem__(self, position: int) -> int:
        """Index of the sequence at `position` >= 0; positions keep counting across epochs."""
        epoch, index = divmod(position, self._num_sequences)
        if epoch != self._epoch:
            self._keys, self._epoch = round_keys(self._seed, epoch), epoch
        return permute(index, self._num_sequences, self._keys)


def round_keys(seed: int, epoch: int | str) -> tuple[int, ...]:
    """A key of 64 bits for each round of the network."""
    digest = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * FEISTEL_ROUNDS)
    return struct.unpack(f"<{FEISTEL_ROUNDS}Q", digest)


def permute(index: int, size: int, keys: tuple[int, ...]) -> int:
    """The place of `index` in a permutation of range(size) that follows from the keys, without an array.

    A Feistel network permutes the cells of a table: in turn, a function of the column is added to the row (modulo the
    number of rows), and one of the row to the column. Each of these steps can be undone, so together they are a
    bijection. The table may have cells beyond `size`; from one of them the network is applied again until it leads to
    another.
    """
    num_rows = math.isqrt(size - 1) + 1
    num_cols = -(-size // num_rows)
    while True:
        row, col = divmod(index, num_cols)
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            row = (row + mix(col ^ first)) % num_rows
            col = (col + mix(row ^ second)) % num_cols
        index = row * num_cols + col
        if index < size:
            return index


def mix(word: int) -> int:
    """Mix 64 bits: the finaliser of splitmix64 (Steele et al., 2014)."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


class MixturePosition(NamedTuple):
    """Index of a source, and of a sequence within it."""

    source: int
    sequence: int


class MixtureShares:
    """Number of the first n positions that belong to each source: exact, monotonic in n and close to n x weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        rest = list(accumulate(reversed(exact)))[::-1]
        # Each fraction is of what the earlier sources leave. Integers, because floats may round differently elsewhere.
        self._steps = [
            (weight / left).as_integer_ratio() if left else (0, 1) for weight, left in zip(exact, rest, strict=True)
        ]

    def counts(self, n: int) -> tuple[int, ...]:
        """Number of positions of each source; they add up to n."""
        counts = []
        for numerator, denominator in self._steps:
            counts.append(n * numerator // denominator)
            n -= counts[-1]
        return tuple(counts)

    def locate(self, position: int) -> MixturePosition:
        """Source of a position and the sequence within that source, before any shuffling."""
        before, after = self.counts(position), self.counts(position + 1)
        source = next(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new > old)
        return MixturePosition(source, before[source])

    def max_positions(self, available: Sequence[int]) -> int:
        """The largest n for which no source needs more sequences than it has available."""
        enough = range(sum(available) + 1)
        return bisect_right(enough, False, key=lambda n: any(map(int.__gt__, self.counts(n), available))) - 1


class OneOrder(Protocol):
    """The reading order of one source."""

    def __getitem__(self, position: int, /) -> int: ...


class MixedOrder:
    """Infinite reading order over several sources; each source keeps its own order."""

    def __init__(self, weights: Sequence[float], orders: Sequence["OneOrder"], seed: int) -> None:
        """`orders` has one order per weight; with a single source the result is that source's order."""
        assert len(weights) == len(orders), f"{len(weights)} weights, {len(orders)} orders"
        self._shares = MixtureShares(weights)
        self._orders = orders
        self._seed = seed
        self._block = -1
        self._sources = self._ranks = np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> MixturePosition:
        """Source and sequence at `position` >= 0: O(1) within the current block; another block is shuffled first."""
        self._load_block(position // BLOCK)
        source = int(self._sources[position % BLOCK])
        return MixturePosition(source, self._orders[source][int(self._ranks[position % BLOCK])])

    def counts(self, position: int) -> tuple[int, ...]:
        """Number of positions before this one that belong to each source."""
        self._load_block(position // BLOCK)
        inside = np.bincount(self._sources[: position % BLOCK], minlength=len(self._orders)).tolist()
        return tuple(map(int.__add__, self._shares.counts(position // BLOCK * BLOCK), inside))

    def bounds(self, source: int, first: int, end: int) -> range:
        """A range of the source's own positions that holds those of positions `first` to `end`; shuffles nothing."""
        blocks = first // BLOCK, -(-end // BLOCK)
        low, high = (self._shares.counts(block * BLOCK)[source] for block in blocks)
        return range(low, high)

    def _load_block(self, block: int) -> None:
        """Shuffle the sources over the positions of a block and number the positions of each source."""
        if block == self._block:
            return
        first, following = self._shares.counts(block * BLOCK), self._shares.counts((block + 1) * BLOCK)
        here = [new - old for old, new in zip(first, following, strict=True)]
        # numpy has frozen the streams of RandomState. One seed more than SequenceOrder has gives a different stream.
        seeds = [self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF, block & 0xFFFFFFFF, block >> 32]
        self._sources = np.random.RandomState(seeds).permutation(np.repeat(np.arange(len(here)), here))
        self._ranks = np.empty(BLOCK, dtype=np.int64)
        for source, start in enumerate(first):
            self._ranks[self._sources == source] = np.arange(start, start + here[source])
        self._block = block


class Sequences(Protocol):
    """The training sequences of one source, of one length."""

    @property
    def order(self) -> OneOrder: ...

    @property
    def number(self) -> int | None:
        """How many there are; None while that is not known."""
        ...

    def window(self, index: int) -> np.ndarray:
        """The tokens of a sequence and the one after it. Waits until they are here. Raises InputError."""
        ...

    def expect(self, positions: Iterable[range]) -> None:
        """Say which positions will be read soon, in order. Returns at once."""
        ...


@runtime_checkable
class StreamedTokens(Protocol):
    """Training tokens that need not be here yet (inner/data/streaming)."""

    def __len__(self) -> int: ...

    def cut(self, seq_len: int, seed: int) -> Sequences: ...

    def close(self) -> None: ...


class WholeText:
    """Sequences of tokens that are all here. `shuffled`: how many of them lie in a shard; None shuffles all."""

    def __init__(self, tokens: Tokens, seq_len: int, seed: int, shuffled: int | None) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self.number: int = (len(tokens) - 1) // seq_len
        self.order: OneOrder = (
            SequenceOrder(self.number, seed) if shuffled is None else ShardOrder(self, seed, shuffled // seq_len)
        )

    def window(self, index: int) -> np.ndarray:
        # A window is one token longer than the stride, so every token but the first is a target exactly once.
        return self._tokens[index * self._seq_len : (index + 1) * self._seq_len + 1]

    def expect(self, positions: Iterable[range]) -> None:
        pass

    def count_through(self, shard: int) -> tuple[int, bool]:
        return self.number, True


class ShardSource(Protocol):
    """What an order by shards asks of a text."""

    def count_through(self, shard: int) -> tuple[int, bool]:
        """The number of sequences that are known, at least to the end of this shard, and whether they are all.

        Waits for the shard if need be. Raises InputError.
        """
        ...


class ShardOrder:
    """The shards in the order of the text, each shuffled anew in each epoch.

    >>> text = WholeText(np.zeros(11, np.uint16), seq_len=1, seed=0, shuffled=4)
    >>> [sorted(text.order[p] for p in range(a, b)) for a, b in ((0, 4), (4, 8), (8, 10), (10, 14))]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    """

    def __init__(self, source: ShardSource, seed: int, sequences_per_shard: int) -> None:
        self._source, self._seed, self._per_shard = source, seed, sequences_per_shard
        self._of = (-1, -1)
        self._keys: tuple[int, ...] = ()

    def __getitem__(self, position: int) -> int:
        epoch, index = self._locate(position)
        shard, place = divmod(index, self._per_shard)
        first = shard * self._per_shard
        known, _ = self._source.count_through(shard)
        if self._of != (epoch, shard):
            self._keys, self._of = round_keys(self._seed, f"{epoch}/{shard}"), (epoch, shard)
        return first + permute(place, min(self._per_shard, known - first), self._keys)

    def shard_of(self, position: int, number: int | None) -> int:
        """The shard in which a position lies, where `number` sequences are in the text, or it has not ended (None)."""
        return (position if number is None else position % number) // self._per_shard

    def _locate(self, position: int) -> tuple[int, int]:
        known, is_all = self._source.count_through(0)
        if position >= known and not is_all:
            known, is_all = self._source.count_through(position // self._per_shard)
        return divmod(position, known) if is_all else (0, position)
