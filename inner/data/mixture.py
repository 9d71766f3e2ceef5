"""Reading order of one or several sources. It follows from weights, seed and position, so there is
no state to save.

The order of a source is computed for each position, because an array of the whole order may not fit
into memory: 15T tokens are 1.8G sequences of 8192. It is computed with exact integers, so it is the
same on every machine.

Positions are cut into blocks. The number of the first n positions that belong to each source is
rounded from the weights alone (MixtureShares), so it is known at every block boundary without
counting. A seeded shuffle then assigns the positions within a block to the sources. With weights 3
: 1 and blocks of 4:

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
"""Number of positions after which every source has received its share, to within a few
sequences.
"""
READING_ORDER = 2
"""Version of the order. A checkpoint counts the text that was read by positions in the order of its
own version."""
FEISTEL_ROUNDS = 16
"""Number of rounds of the Feistel network. Luby and Rackoff (1988) prove that four are enough for
large tables. With eight, the orders of five sequences are not equally frequent; with sixteen they
are."""
WORD = (1 << 64) - 1


class SequenceOrder:
    """Infinite reading order of `num_sequences` sequences: every epoch visits each one once, in a
    new random order.

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
        """Return the index of the sequence at `position` >= 0. Positions continue to count across
        epochs.
        """
        epoch, index = divmod(position, self._num_sequences)
        if epoch != self._epoch:
            self._keys = round_keys(self._seed, epoch)
            self._epoch = epoch
        return permute(index, self._num_sequences, self._keys)


def round_keys(seed: int, epoch: int | str) -> tuple[int, ...]:
    """Return a 64-bit key for each round of the Feistel network."""
    digest = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * FEISTEL_ROUNDS)
    return struct.unpack(f"<{FEISTEL_ROUNDS}Q", digest)


def permute(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Return the place of `index` in a permutation of range(size) that follows from the keys,
    without an array.

    A Feistel network permutes the cells of a table: in turn, a function of the column is added to
    the row (modulo the number of rows), and a function of the row to the column. Each of these
    steps can be undone, so together they are a bijection. The table may have more than `size`
    cells. If the result is a cell beyond `size`, the network is applied to it again, until the
    result is below `size`.
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
    """The number of the first n positions that belong to each source: exact, monotonic in n and
    close to n x weight.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        rest = list(accumulate(reversed(exact)))[::-1]
        # Each fraction is a share of what the earlier sources leave. Use integers, because floats
        # may round differently on other machines.
        self._steps = [
            (weight / left).as_integer_ratio() if left else (0, 1)
            for weight, left in zip(exact, rest, strict=True)
        ]

    def counts(self, n: int) -> tuple[int, ...]:
        """Return the number of positions of each source among the first n; the numbers add up to
        n.
        """
        counts = []
        for numerator, denominator in self._steps:
            counts.append(n * numerator // denominator)
            n -= counts[-1]
        return tuple(counts)

    def locate(self, position: int) -> MixturePosition:
        """Return the source of a position and the sequence within that source, before any
        shuffling.
        """
        before = self.counts(position)
        after = self.counts(position + 1)
        source = next(
            i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new > old
        )
        return MixturePosition(source, before[source])

    def max_positions(self, available: Sequence[int]) -> int:
        """Return the largest n for which no source needs more sequences than are available."""
        enough = range(sum(available) + 1)
        return (
            bisect_right(
                enough, False, key=lambda n: any(map(int.__gt__, self.counts(n), available))
            )
            - 1
        )


class OneOrder(Protocol):
    """The reading order of one source."""

    def __getitem__(self, position: int, /) -> int: ...


class MixedOrder:
    """Infinite reading order over several sources; each source keeps its own order."""

    def __init__(self, weights: Sequence[float], orders: Sequence["OneOrder"], seed: int) -> None:
        """Mix sources by `weights`. `orders` has one order per weight; with one source the result
        is that source's order.
        """
        assert len(weights) == len(orders), f"{len(weights)} weights, {len(orders)} orders"
        self._shares = MixtureShares(weights)
        self._orders = orders
        self._seed = seed
        self._block = -1
        self._sources = self._ranks = np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> MixturePosition:
        """Return source and sequence at `position` >= 0. O(1) within the current block; another
        block is shuffled first.
        """
        self._load_block(position // BLOCK)
        source = int(self._sources[position % BLOCK])
        return MixturePosition(source, self._orders[source][int(self._ranks[position % BLOCK])])

    def counts(self, position: int) -> tuple[int, ...]:
        """Return the number of positions of each source before `position`."""
        self._load_block(position // BLOCK)
        inside = np.bincount(
            self._sources[: position % BLOCK], minlength=len(self._orders)
        ).tolist()
        return tuple(map(int.__add__, self._shares.counts(position // BLOCK * BLOCK), inside))

    def bounds(self, source: int, first: int, end: int) -> range:
        """Return a range of the source's own positions that contains all of its positions from
        `first` to `end`. It may be slightly too large, because nothing is shuffled to find it.
        """
        blocks = first // BLOCK, -(-end // BLOCK)
        low, high = (self._shares.counts(block * BLOCK)[source] for block in blocks)
        return range(low, high)

    def _load_block(self, block: int) -> None:
        """Shuffle the sources over the positions of a block and number the positions of each
        source.
        """
        if block == self._block:
            return
        first = self._shares.counts(block * BLOCK)
        following = self._shares.counts((block + 1) * BLOCK)
        here = [new - old for old, new in zip(first, following, strict=True)]
        # numpy guarantees that the stream of RandomState for a seed never changes. The seed has one
        # number more than SequenceOrder's seed, so that their streams differ.
        seeds = [
            self._seed & 0xFFFFFFFF,
            self._seed >> 32 & 0xFFFFFFFF,
            block & 0xFFFFFFFF,
            block >> 32,
        ]
        self._sources = np.random.RandomState(seeds).permutation(
            np.repeat(np.arange(len(here)), here)
        )
        self._ranks = np.empty(BLOCK, dtype=np.int64)
        for source, start in enumerate(first):
            self._ranks[self._sources == source] = np.arange(start, start + here[source])
        self._block = block


class Sequences(Protocol):
    """The training sequences of one source, all of the same length."""

    @property
    def order(self) -> OneOrder: ...

    @property
    def number(self) -> int | None:
        """Number of sequences; None while it is unknown."""
        ...

    def window(self, index: int) -> np.ndarray:
        """Return the tokens of a sequence and the next token. Waits until they are here. Raises
        InputError.
        """
        ...

    def expect(self, positions: Iterable[range]) -> None:
        """Announce the positions that will be read soon, in order. Returns at once."""
        ...


@runtime_checkable
class StreamedTokens(Protocol):
    """Training tokens that may still have to be fetched or tokenised (inner/data/streaming)."""

    def __len__(self) -> int: ...

    def cut(self, seq_len: int, seed: int) -> Sequences: ...

    def close(self) -> None: ...


class WholeText:
    """Sequences of a text that is completely here. `shuffled`: number of tokens in a shard, within
    which sequences are shuffled; None shuffles all together.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int, shuffled: int | None) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self.number: int = (len(tokens) - 1) // seq_len
        self.order: OneOrder = (
            SequenceOrder(self.number, seed)
            if shuffled is None
            else ShardOrder(self, seed, shuffled // seq_len)
        )

    def window(self, index: int) -> np.ndarray:
        # A window is one token longer than the stride, so every token but the first is a target
        # exactly once.
        return self._tokens[index * self._seq_len : (index + 1) * self._seq_len + 1]

    def expect(self, positions: Iterable[range]) -> None:
        pass

    def count_through(self, shard: int) -> tuple[int, bool]:
        return self.number, True


class ShardSource(Protocol):
    """The method of a text that the order by shards needs."""

    def count_through(self, shard: int) -> tuple[int, bool]:
        """Return the number of sequences known so far, and whether these are all.

        The number includes at least the sequences up to the end of this shard. Waits for the shard
        if necessary. Raises InputError.
        """
        ...


class ShardOrder:
    """Reads the shards in the order of the text, and shuffles each shard differently in each epoch.

    >>> text = WholeText(np.zeros(11, np.uint16), seq_len=1, seed=0, shuffled=4)
    >>> [sorted(text.order[p] for p in range(a, b)) for a, b in ((0, 4), (4, 8), (8, 10), (10, 14))]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    """

    def __init__(self, source: ShardSource, seed: int, sequences_per_shard: int) -> None:
        self._source = source
        self._seed = seed
        self._per_shard = sequences_per_shard
        self._of = (-1, -1)
        self._keys: tuple[int, ...] = ()

    def __getitem__(self, position: int) -> int:
        epoch, index = self._locate(position)
        shard, place = divmod(index, self._per_shard)
        first = shard * self._per_shard
        known, _ = self._source.count_through(shard)
        if self._of != (epoch, shard):
            self._keys = round_keys(self._seed, f"{epoch}/{shard}")
            self._of = (epoch, shard)
        return first + permute(place, min(self._per_shard, known - first), self._keys)

    def shard_of(self, position: int, number: int | None) -> int:
        """Return the index of the shard that holds `position`. `number`: sequences in the text;
        None while it has not ended.
        """
        return (position if number is None else position % number) // self._per_shard

    def _locate(self, position: int) -> tuple[int, int]:
        known, is_all = self._source.count_through(0)
        if position >= known and not is_all:
            known, is_all = self._source.count_through(position // self._per_shard)
        return divmod(position, known) if is_all else (0, position)
