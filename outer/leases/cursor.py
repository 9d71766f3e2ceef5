"""What text one rank of an island reads: the units of the island's lease, in order (outer/account.py)."""

from outer.account import Account, Terms, lease_for, still_leased
from outer.runs import Runs, count, head, tail


class Reading:
    """Every rank of the island has one and makes the same calls, so that all read the same units."""

    def __init__(self, island: str, index: int, incarnation: str, terms: Terms) -> None:
        self._island, self._index, self._incarnation, self._terms = island, index, incarnation, terms
        self._lease: Runs = ()
        """From the first unit that no commit has settled."""
        self._num_read = 0

    @property
    def read(self) -> Runs:
        """Units that have been read and not settled: those of the island's whole progress."""
        return head(self._lease, self._num_read)

    @property
    def num_left(self) -> int:
        """Units that may be read before the next commit."""
        return count(self._lease) - self._num_read

    def first(self, account: Account) -> int:
        """The first unit of the island's lease by this account, or where it reads without one.

        Any thread may ask.
        """
        lease = account.leases.get(self._island)
        runs = self._lease if lease is None else lease.runs
        return runs[0][0] if runs else 0

    def begin(self, account: Account) -> None:
        """There is no progress: what was read and not settled will be read again, here or elsewhere."""
        self._lease = lease_for(account, self._island, self._index, self._incarnation, self._terms)
        self._num_read = 0

    def take_up(self, number: int) -> None:
        """After `begin`: the first `number` units were read by progress that a checkpoint held."""
        self._num_read = min(number, count(self._lease))

    def next_unit(self) -> int:
        """The unit of the next inner step. There must be one left."""
        assert self.num_left > 0, "inner steps end when the lease is used up"
        unit = tail(self._lease, self._num_read)[0][0]
        self._num_read += 1
        return unit

    def settle(self, account: Account, number: int) -> None:
        """A commit has made this account, and the first `number` units read are trained now."""
        self._lease = tail(self._lease, number)
        self._num_read -= number
        if not self.go_on(account):
            assert self._num_read == 0, "who takes part in a commit keeps its lease"
            self.begin(account)

    def go_on(self, account: Account) -> bool:
        """Whether the progress may count under this account: its units are the island's own, and not trained yet.

        If not, `begin`.
        """
        lease = still_leased(account, self._island, self._index, self._lease, self._num_read)
        if lease is not None:
            self._lease = lease
        return lease is not None
