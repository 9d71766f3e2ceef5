"""What an island gives to rounds that it listens to: handed over by the thread that trains, while they are prepared."""

import threading

from outer.errors import OuterError
from outer.island_state import Snapshot


class Offer:
    """Of one rank. A snapshot is good for its own round alone."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._snapshot = snapshot
        self._changed = threading.Condition()

    def put(self, snapshot: Snapshot) -> None:
        """From now on this is given to its round."""
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def of(self, round_number: int) -> Snapshot | None:
        """What is given to the round by now; None: nothing, the island listens."""
        with self._changed:
            return self._find(round_number)

    def wait(self, round_number: int, seconds: float) -> Snapshot:
        """What is given to the round, when the island's leader has given it: other ranks are about to."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(round_number) is not None, seconds)
            snapshot = self._find(round_number)
        if snapshot is None:
            raise OuterError(f"round {round_number}: this rank did not come to its snapshot within {seconds:.0f} s")
        return snapshot

    def _find(self, round_number: int) -> Snapshot | None:
        return self._snapshot if self._snapshot is not None and self._snapshot.round == round_number else None
