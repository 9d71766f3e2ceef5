"""The parts of a state that a rank downloads, and the changes that the means of later rounds
make to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outer.codecs.choice import CodecChoice
from outer.config import OuterOptimizerConfig
from outer.space.layout import Space


@dataclass(frozen=True)
class DownloadPlan:
    """The parts that this rank downloads, and the codec and optimizer that bring a part to a
    later round.
    """

    space: Space
    parts: Sequence[int]
    coding: CodecChoice
    optimizer: OuterOptimizerConfig
    num_islands: int = 1
    """Number of pushes after which Delayed Nesterov moves the momentum."""

    def changes(self, part: int, round_number: int) -> bool:
        """Return whether the round changes the part, because it sends the part's group."""
        return self.space.sends(round_number, self.space.parts[part].part_group)

    def mean_bytes(self, part: int, first: int, stop: int) -> int:
        """Return the size in bytes of the encoded means that lead the part from round `first` to
        round `stop`.
        """
        bounds = self.space.parts[part]
        count = sum(self.changes(part, number) for number in range(first, stop))
        return count * self.coding.mean_codec_for(bounds).num_bytes(bounds.num_elements)

    def optimizer_for(self, part: int) -> OuterOptimizerConfig | None:
        """Return the config of the optimizer that applies a mean to the part. None for moments
        and buffers, which the mean replaces.
        """
        return None if self.space.parts[part].is_replaced else self.optimizer
