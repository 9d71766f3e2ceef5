"""Detect loss spikes: a step's loss far above the losses of the steps before it."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from inner.config import SpikeConfig


@dataclass(frozen=True)
class Spike:
    """A loss that is a spike."""

    deviations: float
    """Number of standard deviations above the mean of the previous losses; infinity if these were
    all equal."""
    action: str
    """The action that the config chooses: `note`, `skip` or `rewind`."""


class SpikeWatch:
    """The last losses of an island. All ranks see the same losses, so all make the same decisions.

    A spike enters the history like any loss. If the loss rises permanently, for example because the
    data changes, later losses therefore soon count as normal, and steps are not skipped forever.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.steps)

    @property
    def losses(self) -> list[float]:
        """The losses that the next loss is compared with, the oldest first. A checkpoint saves
        them.
        """
        return list(self._losses)

    @losses.setter
    def losses(self, values: Sequence[float]) -> None:
        self._losses = deque(values, maxlen=self._config.steps)

    def observe(self, loss: float) -> Spike | None:
        """Add a finite loss to the history. Return a spike if it is one; there is none before
        `steps` losses are known.
        """
        known = self.losses
        self._losses.append(loss)
        if len(known) < self._config.steps:
            return None
        mean = sum(known) / len(known)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in known) / (len(known) - 1))
        if loss <= mean + self._config.deviations * deviation:
            return None
        return Spike((loss - mean) / deviation if deviation else math.inf, self._config.action)
