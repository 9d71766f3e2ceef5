"""Which units of data the ranks of an island read next. A unit is the data of one inner step of one island."""

from typing import Protocol

from outer.leases.ledger import Ledger, Terms, extend_lease, find_lease
from outer.leases.ranges import Ranges, count, head, tail


class Cursor(Protocol):
    """Position of one island in the data. Every rank has one and makes the same calls, so all read the same units."""

    @property
    def read(self) -> Ranges:
        """Units that have been read and that no commit has settled: the data behind the island's whole progress."""
        ...

    @property
    def num_left(self) -> int:
        """Number of units that may be read before the next commit."""
        ...

    @property
    def coming(self) -> Ranges:
        """Those units, in order."""
        ...

    @property
    def num_own(self) -> int:
        """Number of units that this island has read before the next one, in committed rounds and since: of an island
        with data of its own."""
        ...

    def begin(self, round_number: int, ledger: Ledger) -> None:
        """Start without progress at this position: units read and not settled will be read again."""
        ...

    def resume(self, number: int) -> None:
        """After `begin`: mark the first `number` units as read, by progress that a checkpoint held."""
        ...

    def next_unit(self) -> int:
        """The unit of the next inner step. There must be one left."""
        ...

    def settle(self, round_number: int, ledger: Ledger, number: int) -> None:
        """A commit has led to this position, and it contains the first `number` units read."""
        ...

    def keep(self, ledger: Ledger) -> bool:
        """Whether progress on the units read may count under this ledger, which replaces the last. If not, `begin`."""
        ...


class LeaseCursor:
    """Reads the units of the island's lease in order (outer/leases/ledger.py)."""

    def __init__(self, island: str, index: int, incarnation: str, terms: Terms) -> None:
        self._island, self._index, self._incarnation, self._terms = island, index, incarnation, terms
        self._lease: Ranges = ()
        """The island's units, starting with the first one that no commit has settled."""
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
        """First unit of the island's lease, or the first one it reads without a lease. Call it from any thread."""
        ranges = ledger.leases[self._island].runs if self._island in ledger.leases else self._lease
        return ranges[0][0] if ranges else 0

    def begin(self, round_number: int, ledger: Ledger) -> None:
        self._lease = find_lease(ledger, self._island, self._index, self._incarnation, self._terms)
        self._num_read, self._num_settled = 0, ledger.trained_by.get(self._island, 0)

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
        """Whether the units read are still the island's own and not trained by others yet."""
        lease = extend_lease(ledger, self._island, self._index, self._lease, self._num_read)
        if lease is not None:
            self._lease = lease
        return lease is not None
