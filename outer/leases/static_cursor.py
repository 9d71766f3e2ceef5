"""What text an island of a gossip run reads: with no commit of all there is no account, only a place for each island.

Of n islands (start_islands) that make T inner steps in a run, in the order of outer/account.py's units:

    unit     0 1 ... n-1 | n n+1 ... | ...      n T + i T . . .
             step 0      | step 1    | ...      island i, which joined or is beyond n: T units to itself, a step each

An island's step alone says which unit it is. What it read for a round that it did not make is read by nobody.
"""

from outer.config import OuterConfig
from outer.runs import Runs


class OwnReading:
    """Of the face of outer/reading.py. Every rank of the island has one and makes the same calls."""

    def __init__(self, config: OuterConfig, index: int, *, joins: bool) -> None:
        islands, steps = config.start_islands, config.rounds * config.inner_steps
        has_seat = index < islands and not joins
        first, stride = (index, islands) if has_seat else ((islands + index) * steps, 1)
        self._units = range(first, first + steps * stride, stride)
        """By inner step of the run."""
        self._begun = self._step = 0

    @property
    def read(self) -> Runs:
        """Units that the island's progress has read."""
        run = self._units[self._begun : self._step]
        return (run,) if run else ()

    @property
    def num_left(self) -> int:
        """Units that may be read before the run is over."""
        return len(self._units) - self._step

    def begin(self, step: int) -> None:
        """There is no progress, and so many inner steps of the run are behind the island."""
        self._begun = self._step = step

    def take_up(self, number: int) -> None:
        """After `begin`: the first `number` units were read by progress that a checkpoint held."""
        self._step += number

    def next_unit(self) -> int:
        """The unit of the next inner step. There must be one left."""
        assert self.num_left > 0, "the run is over after its last inner step"
        self._step += 1
        return self._units[self._step - 1]
