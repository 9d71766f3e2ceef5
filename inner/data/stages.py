"""Where the stages of a run read the text: each goes on behind the blocks that earlier ones have begun."""

from collections.abc import Sequence
from typing import NamedTuple

from inner.data.mixture import MixedOrder, SequenceOrder


class BlockOrder:
    """The order of the sequences of a source that is read in blocks: those of a block follow each other."""

    def __init__(self, order: SequenceOrder, first_block: int, per_block: int) -> None:
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
