"""Notices loss spikes: a step's loss far above those of the steps before it."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from inner.config import SpikeConfig


@dataclass(frozen=True)
class Spike:
    """A loss that is a spike."""

    deviations: float
    """Standard deviations above the mean of the losses before it; infinity if these were all equal."""
    action: str
    """What the config does about it: `note`, `skip` or `rewind`."""


class SpikeWatch:
    """The last losses of an island. All ranks see the same ones, so all decide alike.

    A spike enters the history like any loss: when the loss rises for good, for example because the data changes, the
    later losses are soon normal again, and nothing is skipped for ever.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.steps)

    @property
    def losses(self) -> list[float]:
        """The losses that the next one is compared with, the oldest first; a checkpoint keeps them."""
        return list(self._losses)

    @losses.setter
    def losses(self, values: Sequence[float]) -> None:
        self._losses = deque(values, maxlen=self._config.steps)

    def observe(self, loss: float) -> Spike | None:
        """Take in a finite loss. Returns a spike if it is one; never before `steps` losses are known."""
        known = self.losses
        self._losses.append(loss)
        if len(known) < self._config.steps:
            return None
        mean = sum(known) / len(known)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in known) / (len(known) - 1))
        if loss <= mean + self._config.deviations * deviation:
            return None
        return Spike((loss - mean) / deviation if deviation else math.inf, self._config.action)
