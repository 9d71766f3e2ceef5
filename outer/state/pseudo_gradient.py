"""The pseudo-gradient that an island contributes to a round, and its transfer between threads."""

import threading
from dataclasses import dataclass

import torch

from outer.errors import OuterError
from outer.leases.ranges import Ranges
from outer.state.earlier import EarlierState


@dataclass(frozen=True)
class Snapshot:
    """One rank's parts of the pseudo-gradient of a round's fragment: global params minus local params, fp32.

    It also holds the fragment's buffers, and in rounds that average moments its moments, unchanged.
    """

    round: int
    fragment: int
    pseudo_grads: dict[int, torch.Tensor]
    """The pseudo-gradient's parts, by part index."""
    tokens: int
    """Tokens trained on since the last round was sent."""
    weight: int
    """Tokens trained on since this fragment was last averaged, which are the island's weight in
    the mean."""
    units: Ranges
    """Units of data read since the last commit."""


class Contribution:
    """Thread-safe slot for one rank's snapshot, which the training thread fills while a round is
    being prepared.

    A snapshot counts for its own round only. Without a snapshot the island observes the round.
    """

    def __init__(self, snapshot: Snapshot | None = None, earlier: EarlierState | None = None) -> None:
        """Create the slot. `earlier`: the state to which this island would go back instead,
        together with others.
        """
        self.earlier = earlier
        self._snapshot = snapshot
        self._changed = threading.Condition()

    def put(self, snapshot: Snapshot) -> None:
        """Contribute this snapshot to its round from now on."""
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def find(self, round_number: int) -> Snapshot | None:
        """Return the snapshot for the round, or None while the island only observes it."""
        with self._changed:
            return self._find(round_number)

    def wait(self, round_number: int, seconds: float) -> Snapshot:
        """Return the snapshot for the round, which the island's leader has already contributed on
        its own rank.

        Raises OuterError when this rank has no snapshot within `seconds`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._find(round_number) is not None, seconds)
            snapshot = self._find(round_number)
        if snapshot is None:
            raise OuterError(f"round {round_number}: this rank had no snapshot within {seconds:.0f} s")
        return snapshot

    def _find(self, round_number: int) -> Snapshot | None:
        return self._snapshot if self._snapshot is not None and self._snapshot.round == round_number else None
