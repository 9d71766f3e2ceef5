"""The choice of donors for a joiner, and when the joiner stops asking an island that does not
provide the state it claims.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outer.membership.base import Member

TRIES = 4
"""Number of failed tries after which an island's claim to be ahead is ignored."""
TRY_SECONDS = 60.0
"""The claim is ignored after a single failed try if that took at least this time."""
MAX_ASKED = 16
"""Most islands that are asked in the first try; each further try asks twice as many. The length
of a description grows with the islands of a run. The descriptions of 1,024 islands together did
not fit through a link of 100 Mbit/s in time."""


def ignore(donors: Sequence[Member]) -> None:
    """Do nothing. This is the default of `DonorChoice.disbelieve` and `.believe`."""


@dataclass
class DonorChoice:
    """The donors of one catch-up, for each of its tries. On the leader only."""

    find_donors: Callable[[], Sequence[Member]]
    """Function that returns the islands that hold the surviving history now; empty if this
    island holds it."""
    now: Callable[[], float]
    """Clock of the waits, in seconds."""
    disbelieve: Callable[[Sequence[Member]], None] = ignore
    """Function called with islands that did not provide the state that they claim."""
    believe: Callable[[Sequence[Member]], None] = ignore
    """Function called with islands that provided the state that they claim."""
    spread: str = ""
    """A text that differs between joiners, so that they ask different islands."""
    _failures: Counter[str] = field(default_factory=Counter)
    _given_up: set[str] = field(default_factory=set)
    _is_one_by_one: bool = False
    _most: int = MAX_ASKED

    def next(self) -> list[Member]:
        """Return the donors of the next try. Empty if no island is ahead any more, except those
        that are ignored.
        """
        self._asked = [donor for donor in self.find_donors() if donor.island not in self._given_up]
        if self._is_one_by_one and self._asked:
            self._asked = [
                min(self._asked, key=lambda donor: (self._failures[donor.island], donor.island))
            ]
        elif len(self._asked) > self._most:
            self._asked = sorted(self._asked, key=self._turn)[: self._most]
        self._started_at = self.now()
        return self._asked

    def has_failed(self, *, is_wrong: bool) -> None:
        """Record that the last try failed. `is_wrong`: a state arrived that is not the one that
        the donors describe.
        """
        if is_wrong and len(self._asked) > 1:
            # One of them has sent wrong parts, and it is not known which donor.
            self._is_one_by_one = True
            return
        self._most *= 2
        is_long = self.now() - self._started_at > TRY_SECONDS
        self._failures.update({donor.island: TRIES if is_long else 1 for donor in self._asked})
        given_up = [donor for donor in self._asked if self._failures[donor.island] >= TRIES]
        self._given_up |= {donor.island for donor in given_up}
        self.disbelieve(given_up)

    def _turn(self, donor: Member) -> tuple[int, int, str]:
        """Return a sort key: donors with fewer failures first, in an order that differs between
        joiners.
        """
        number = zlib.crc32(f"{self.spread}/{donor.island}".encode())
        return self._failures[donor.island], number, donor.island

    def has_given(self) -> None:
        """Record that the state has been taken from the donors of the last try."""
        self.believe(self._asked)
