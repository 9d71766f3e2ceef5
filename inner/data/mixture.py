"""Which source a sequence comes from: a pure function of weights, seed and position, with nothing to save or restore.

Positions are cut into blocks. How many of the first n positions fall to each source is rounded from the weights
alone (Shares), so it is known at the border of any block without counting; a seeded shuffle of the block then says
which of its positions are whose. With weights 3 : 1 and blocks of 4:

    block        0           1           2
    source    0 1 0 0     0 0 0 1     1 0 0 0
    sequence  0 0 1 2     3 4 5 1     2 6 7 8       before the source's own order
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

BLOCK = 1024
"""Positions after which every source has its share, to within a few sequences."""


class Order(Protocol):
    """In which order the sequences of one source are read, epoch after epoch."""

    def __getitem__(self, position: int, /) -> int: ...


class Place(NamedTuple):
    """Where a sequence lies."""

    source: int
    sequence: int


class Shares:
    """How many of the first n positions fall to each source: exact, never fewer for a larger n, near n x weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        rest = list(accumulate(reversed(exact)))[::-1]
        # Of what earlier sources leave. Integers, for floats might round otherwise on another machine.
        self._steps = [(weight / left).as_integer_ratio() for weight, left in zip(exact, rest, strict=True)]

    def counts(self, n: int) -> tuple[int, ...]:
        """For each source; together n."""
        found = []
        for numerator, denominator in self._steps:
            found.append(n * numerator // denominator)
            n -= found[-1]
        return tuple(found)

    def place(self, position: int) -> Place:
        """Whose the position is, and which of that source's; in this plain order, without any shuffle."""
        before, after = self.counts(position), self.counts(position + 1)
        source = next(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new > old)
        return Place(source, before[source])

    def most(self, available: Sequence[int]) -> int:
        """The largest n for which no source needs more than it has."""
        enough = range(sum(available) + 1)
        return bisect_right(enough, False, key=lambda n: any(map(int.__gt__, self.counts(n), available))) - 1


class MixedOrder:
    """The infinite order in which the sequences of several sources are read, each source's in its own order."""

    def __init__(self, weights: Sequence[float], orders: Sequence[Order], seed: int) -> None:
        """One order for each weight; with one source it is that source's order."""
        assert len(weights) == len(orders), f"{len(weights)} weights, {len(orders)} orders"
        self._shares = Shares(weights)
        self._orders = orders
        self._seed = seed
        self._block = -1
        self._sources = self._ranks = np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> Place:
        """What is read at `position` >= 0; O(1) for positions near one another, else a block is shuffled."""
        self._enter(position // BLOCK)
        source = int(self._sources[position % BLOCK])
        return Place(source, self._orders[source][int(self._ranks[position % BLOCK])])

    def counts(self, position: int) -> tuple[int, ...]:
        """How many of the positions below this one are each source's."""
        self._enter(position // BLOCK)
        before = self._sources[: position % BLOCK]
        inside = np.bincount(before, minlength=len(self._orders)).tolist()
        return tuple(map(int.__add__, self._shares.counts(position // BLOCK * BLOCK), inside))

    def _enter(self, block: int) -> None:
        """Shuffle the block's sources, and number each one's positions."""
        if block == self._block:
            return
        first, following = self._shares.counts(block * BLOCK), self._shares.counts((block + 1) * BLOCK)
        here = [new - old for old, new in zip(first, following, strict=True)]
        # RandomState, because numpy has frozen its streams. One seed more than SequenceOrder: another stream.
        seeds = [self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF, block & 0xFFFFFFFF, block >> 32]
        self._sources = np.random.RandomState(seeds).permutation(np.repeat(np.arange(len(here)), here))
        self._ranks = np.empty(BLOCK, dtype=np.int64)
        for source, start in enumerate(first):
            self._ranks[self._sources == source] = np.arange(start, start + here[source])
        self._block = block
