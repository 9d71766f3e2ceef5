"""Find the positions at which stages of a run, and islands with sources of their own, read the
text.

Each stage continues after the blocks that earlier stages have begun.
"""

from collections.abc import Sequence
from typing import NamedTuple

from inner.data.mixture import MixedOrder, MixturePosition, MixtureShares, OneOrder, SequenceOrder


class BlockOrder:
    """The order of the sequences of a source that is read in blocks. The sequences of a block
    follow each other.
    """

    def __init__(self, order: OneOrder, first_block: int, per_block: int) -> None:
        """Order sequences by blocks. `order` is the order of the blocks; blocks before
        `first_block` are left out.
        """
        self._order = order
        self._first_block = first_block
        self._per_block = per_block

    def __getitem__(self, position: int) -> int:
        """Return the index of the sequence at `position` >= 0, counted in sequences."""
        block, inside = divmod(position, self._per_block)
        return self._order[self._first_block + block] * self._per_block + inside


class StageReading(NamedTuple):
    """How a stage of a run reads the sources."""

    weights: Sequence[float]
    seq_len: int
    sequences_per_step: int


class StageStart(NamedTuple):
    """Where the reading of a stage begins. Stages read whole blocks of text, which are as long as
    the longest sequence of all stages. Two stages therefore never read the same text in the same
    epoch.
    """

    unit: int = 0
    """Number of the first unit of the stage."""
    blocks: tuple[int, ...] = ()
    """Number of blocks of each source that earlier stages have begun; empty: none."""
    block_len: int | None = None
    """Number of tokens in a block; None: as many as in a sequence."""


def find_stage_start(
    stages: Sequence[StageReading], borders: Sequence[tuple[int, int]], seed: int
) -> StageStart:
    """Return where the next stage begins. `borders` has a pair for each earlier stage: the first
    unit that was never leased in it, and the first unit of the stage after it.
    """
    block_len = max(stage.seq_len for stage in stages)
    unit = 0
    blocks = [0] * len(stages[0].weights)
    for stage, (end, first) in zip(stages, borders, strict=False):
        order = MixedOrder(stage.weights, [SequenceOrder(1, seed)] * len(blocks), seed)
        read = order.counts((end - unit) * stage.sequences_per_step)
        per_block = block_len // stage.seq_len
        blocks = [
            before - (-number // per_block) for before, number in zip(blocks, read, strict=True)
        ]
        unit = first
    return StageStart(unit, tuple(blocks), block_len)


class OwnedSource(NamedTuple):
    """A source that this island reads, but not all other islands do."""

    number: int
    """Number of the source among the texts of the island."""
    order: OneOrder
    reader: tuple[int, int]
    """This island's number among the islands that read the source, and the number of these
    islands."""


class SiteOrder:
    """The reading order of an island that has sources of its own, besides the sources that all
    islands read.

    The island's n-th unit, counted in committed rounds, begins with sequences of its own sources.
    They continue where the unit before ended. The rest of the unit is filled with the first
    sequences of the leased unit; the last sequences of the leased unit are not read.
    """

    def __init__(
        self, own: Sequence[OwnedSource], weights: Sequence[float], shared: MixedOrder, size: int
    ) -> None:
        """Mix own and shared sources. `weights` has one weight for each own source, and a last one
        for all shared sources together. `size`: number of sequences in a unit.

        `shared` numbers its sources as the texts of the island.
        """
        self._own = own
        self._shares = MixtureShares(weights)
        self._shared = shared
        self._size = size
        self._first = 0
        self._places: list[MixturePosition] = []

    def enter(self, unit: int, number: int) -> None:
        """Set the unit that the next positions belong to. `number` is its number among the island's
        units.
        """
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
        """Return source and sequence at a position of the unit."""
        return self._places[position - self._first]

    def count_sources(self, num_sources: int) -> tuple[int, ...]:
        """Return the number of sequences of each source in the unit."""
        read = [place.source for place in self._places]
        return tuple(read.count(source) for source in range(num_sources))
