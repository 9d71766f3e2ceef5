"""The data cursor of a gossip run. Without a commit of all islands there is no ledger, so the units
are fixed.

With n islands (outer.start_islands) that make T inner steps each, in the order of
outer/leases/ledger.py's units:

    unit     0 1 ... n-1 | n n+1 ... | ...      n T + i T . . .
             step 0      | step 1    | ...      island i, if it joined later or i >= n: T units of
                         its own, one per step

The inner step alone decides the unit. Units read for a round that the island did not complete are
not read again.
"""

from outer.config import OuterConfig
from outer.leases.ledger import Ledger
from outer.leases.ranges import Ranges


class StaticCursor:
    """Implements `outer.leases.cursor.Cursor`. The ledgers of a gossip run are empty."""

    def __init__(self, config: OuterConfig, index: int, *, joins: bool) -> None:
        islands = config.start_islands
        steps = config.rounds * config.inner_steps
        has_seat = index < islands and not joins
        first, stride = (index, islands) if has_seat else ((islands + index) * steps, 1)
        self._inner_steps = config.inner_steps
        self._units = range(first, first + steps * stride, stride)
        """The unit of each inner step of the run."""
        self._begun = self._step = 0

    @property
    def read(self) -> Ranges:
        run = self._units[self._begun : self._step]
        return (run,) if run else ()

    @property
    def num_left(self) -> int:
        return len(self._units) - self._step

    @property
    def coming(self) -> Ranges:
        left = self._units[self._step :]
        return (left,) if left else ()

    @property
    def num_own(self) -> int:
        return self._step

    def begin(self, round_number: int, ledger: Ledger) -> None:
        self._begun = self._step = round_number * self._inner_steps

    def resume(self, number: int) -> None:
        self._step += number

    def next_unit(self) -> int:
        assert self.num_left > 0, "the run is over after its last inner step"
        self._step += 1
        return self._units[self._step - 1]

    def settle(self, round_number: int, ledger: Ledger, number: int) -> None:
        self.begin(round_number, ledger)

    def keep(self, ledger: Ledger) -> bool:
        return False  # An island that fell behind starts again at the round it has taken.
