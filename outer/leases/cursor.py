"""Cursors: the units of data that the ranks of an island read next. A unit is the data of one
inner step of one island.
"""

from typing import Protocol

from outer.leases.ledger import Ledger, Terms, extend_lease, find_lease
from outer.leases.ranges import Ranges, count, head, tail


class Cursor(Protocol):
    """Interface of an island's position in the data. Every rank makes the same calls, so all
    ranks read the same units.
    """

    @property
    def read(self) -> Ranges:
        """Units that have been read and that no commit has settled: the data of the island's
        uncommitted progress.
        """
        ...

    @property
    def num_left(self) -> int:
        """Number of units that may be read before the next commit."""
        ...

    @property
    def coming(self) -> Ranges:
        """The units that may be read before the next commit, in order."""
        ...

    @property
    def num_own(self) -> int:
        """Number of units that this island has read so far, in committed rounds and since. For
        an island with data of its own.
        """
        ...

    def begin(self, round_number: int, ledger: Ledger) -> None:
        """Start without progress at this position. Units that were read and not settled will be
        read again.
        """
        ...

    def resume(self, number: int) -> None:
        """Mark the first `number` units as read, by the progress in a checkpoint. Call it after
        `begin`.
        """
        ...

    def next_unit(self) -> int:
        """Return the unit of the next inner step. There must be one left."""
        ...

    def settle(self, round_number: int, ledger: Ledger, number: int) -> None:
        """Record the commit that led to this position. It contains the first `number` units
        read.
        """
        ...

    def keep(self, ledger: Ledger) -> bool:
        """Return whether progress on the units read may count under this ledger, which replaces
        the last one. If not, call `begin`.
        """
        ...


class LeaseCursor:
    """Reads the units of the island's lease in order (outer/leases/ledger.py)."""

    def __init__(self, island: str, index: int, incarnation: str, terms: Terms) -> None:
        self._island = island
        self._index = index
        self._incarnation = incarnation
        self._terms = terms
        self._lease: Ranges = ()
        """The island's units, beginning with the first one that no commit has settled."""
        self._num_read = self._num_settled = 0

    @property
    def num_own(self) -> int:
        return self._num_settled + self._num_read

    @property
    def read(self) -> Ranges:
        return head(self._lease, self._num_read)

    @property
    def num_left(self) -> int:
        return count(self._lease) - self._num_read

    @property
    def coming(self) -> Ranges:
        return tail(self._lease, self._num_read)

    def first_unit(self, ledger: Ledger) -> int:
        """Return the first unit of the island's lease, or the first unit that it reads without a
        lease. Any thread may call it.
        """
        ranges = ledger.leases[self._island].runs if self._island in ledger.leases else self._lease
        return ranges[0][0] if ranges else 0

    def begin(self, round_number: int, ledger: Ledger) -> None:
        self._lease = find_lease(ledger, self._island, self._index, self._incarnation, self._terms)
        self._num_read = 0
        self._num_settled = ledger.trained_by.get(self._island, 0)

    def resume(self, number: int) -> None:
        self._num_read = min(number, count(self._lease))

    def next_unit(self) -> int:
        assert self.num_left > 0, "inner steps end when the lease is used up"
        unit = tail(self._lease, self._num_read)[0][0]
        self._num_read += 1
        return unit

    def settle(self, round_number: int, ledger: Ledger, number: int) -> None:
        self._lease = tail(self._lease, number)
        self._num_read -= number
        self._num_settled = ledger.trained_by.get(self._island, 0)
        if not self.keep(ledger):
            assert self._num_read == 0, "a participant of a commit keeps its lease"
            self.begin(round_number, ledger)

    def keep(self, ledger: Ledger) -> bool:
        """Return whether the units that were read still belong to the island and no other island
        has trained them.
        """
        lease = extend_lease(ledger, self._island, self._index, self._lease, self._num_read)
        if lease is not None:
            self._lease = lease
        return lease is not None
