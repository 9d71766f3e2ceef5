"""Which islands a joiner asks for their state, and when it gives up an island that claims a state it does not give."""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outer.membership.base import Member

TRIES = 4
"""Failed tries after which an island's claim to be ahead is not believed any more."""
TRY_SECONDS = 60.0
"""The same after one failed try, if it took that long."""
MAX_ASKED = 16
"""Most islands that the first try asks, twice as many in each further one. What an island says of its state grows with
the islands of a run: all of 1,024 together took a link of 100 Mbit/s longer than they had to answer."""


def ignore(donors: Sequence[Member]) -> None:
    """Default of `DonorChoice.disbelieve` and `.believe`."""


@dataclass
class DonorChoice:
    """The donors of one catch-up, try after try. On the leader only."""

    find_donors: Callable[[], Sequence[Member]]
    """Finds the islands that hold the surviving history now; none if this island holds it."""
    now: Callable[[], float]
    """The clock of the waits, in seconds."""
    disbelieve: Callable[[Sequence[Member]], None] = ignore
    """Called with islands that have not given the state that they claim."""
    believe: Callable[[Sequence[Member]], None] = ignore
    """Called with islands that have given it."""
    spread: str = ""
    """Joiners with different ones ask different islands."""
    _failures: Counter[str] = field(default_factory=Counter)
    _given_up: set[str] = field(default_factory=set)
    _is_one_by_one: bool = False
    _most: int = MAX_ASKED

    def next(self) -> list[Member]:
        """The donors of the next try. Empty if no island is ahead any more, apart from those that were given up."""
        self._asked = [donor for donor in self.find_donors() if donor.island not in self._given_up]
        if self._is_one_by_one and self._asked:
            self._asked = [min(self._asked, key=lambda donor: (self._failures[donor.island], donor.island))]
        elif len(self._asked) > self._most:
            self._asked = sorted(self._asked, key=self._turn)[: self._most]
        self._started_at = self.now()
        return self._asked

    def has_failed(self, *, is_wrong: bool) -> None:
        """Record that the last try failed. `is_wrong`: a state came, and it is not the one that the donors describe."""
        if is_wrong and len(self._asked) > 1:
            # One of them has sent wrong parts, and it is not known which one.
            self._is_one_by_one = True
            return
        self._most *= 2
        is_long = self.now() - self._started_at > TRY_SECONDS
        self._failures.update({donor.island: TRIES if is_long else 1 for donor in self._asked})
        given_up = [donor for donor in self._asked if self._failures[donor.island] >= TRIES]
        self._given_up |= {donor.island for donor in given_up}
        self.disbelieve(given_up)

    def _turn(self, donor: Member) -> tuple[int, int, str]:
        """Those that have failed less often first, in an order of this joiner's own."""
        number = zlib.crc32(f"{self.spread}/{donor.island}".encode())
        return self._failures[donor.island], number, donor.island

    def has_given(self) -> None:
        """Record that the state has been taken from the donors of the last try."""
        self.believe(self._asked)
