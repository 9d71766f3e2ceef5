"""Where the stages of a run, and islands with sources of their own, read the text.

Each stage goes on behind the blocks that earlier ones have begun.
"""

from collections.abc import Sequence
from typing import NamedTuple

from inner.data.mixture import MixedOrder, MixturePosition, MixtureShares, OneOrder, SequenceOrder


class BlockOrder:
    """The order of the sequences of a source that is read in blocks: those of a block follow each other."""

    def __init__(self, order: OneOrder, first_block: int, per_block: int) -> None:
        """`order` is that of the blocks, of which the first ones are left out."""
        self._order, self._first_block, self._per_block = order, first_block, per_block

    def __getitem__(self, position: int) -> int:
        """Index of the sequence at `position` >= 0, counted in sequences."""
        block, inside = divmod(position, self._per_block)
        return self._order[self._first_block + block] * self._per_block + inside


class StageReading(NamedTuple):
    """How a stage of a run reads the sources."""

    weights: Sequence[float]
    seq_len: int
    sequences_per_step: int


class StageStart(NamedTuple):
    """Where the reading of a stage begins. Stages read whole blocks of text, which are as long as the longest sequence
    of all stages, so none reads what another has read in the same epoch."""

    unit: int = 0
    """The first unit of the stage."""
    blocks: tuple[int, ...] = ()
    """Blocks of each source that earlier stages have begun; empty: none."""
    block_len: int | None = None
    """Tokens of a block; None: those of a sequence."""


def find_stage_start(stages: Sequence[StageReading], borders: Sequence[tuple[int, int]], seed: int) -> StageStart:
    """Where the stage after `borders` begins: (first unit never leased in the stage before, first unit) of each."""
    block_len, unit = max(stage.seq_len for stage in stages), 0
    blocks = [0] * len(stages[0].weights)
    for stage, (end, first) in zip(stages, borders, strict=False):
        order = MixedOrder(stage.weights, [SequenceOrder(1, seed)] * len(blocks), seed)
        read = order.counts((end - unit) * stage.sequences_per_step)
        per_block = block_len // stage.seq_len
        blocks = [before - (-number // per_block) for before, number in zip(blocks, read, strict=True)]
        unit = first
    return StageStart(unit, tuple(blocks), block_len)


class OwnSource(NamedTuple):
    """A source that this island reads and not all others."""

    number: int
    """Its number among the texts of the island."""
    order: OneOrder
    reader: tuple[int, int]
    """The number of this island among those that read it, and how many they are."""


class SiteOrder:
    """The reading order of an island that has sources of its own, besides those that all islands read.

    The island's n-th unit, counted in committed rounds, takes its sequences of each own source where the one before
    ended; the rest of it are the first sequences of the leased unit. Those whose place is taken are not read.
    """

    def __init__(self, own: Sequence[OwnSource], weights: Sequence[float], shared: MixedOrder, size: int) -> None:
        """`weights` are those of the own sources, and at last of all others together. `size`: sequences of a unit.

        `shared` gives the number of a source among all of the island's.
        """
        self._own, self._shares, self._shared, self._size = own, MixtureShares(weights), shared, size
        self._first = 0
        self._places: list[MixturePosition] = []

    def enter(self, unit: int, number: int) -> None:
        """The next positions are those of this unit, which is the island's `number`-th."""
        before, after = (self._shares.counts(n * self._size) for n in (number, number + 1))
        self._first = unit * self._size
        own = [
            MixturePosition(each.number, each.order[index * each.reader[1] + each.reader[0]])
            for each, low, high in zip(self._own, before, after, strict=False)
            for index in range(low, high)
        ]
        rest = range(self._first, self._first + after[-1] - before[-1])
        self._places = own + [self._shared[position] for position in rest]

    def __getitem__(self, position: int) -> MixturePosition:
        """Source and sequence at a position of the unit."""
        return self._places[position - self._first]

    def count_sources(self, num_sources: int) -> tuple[int, ...]:
        """Sequences of each source in the unit."""
        read = [place.source for place in self._places]
        return tuple(read.count(source) for source in range(num_sources))
