"""The pseudo-gradient that an island contributes to a round, and its transfer between threads."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outer.errors import OuterError
from outer.leases.ranges import Ranges
from outer.space.experts import ExpertGroup
from outer.state.earlier import EarlierState


@dataclass(frozen=True)
class Snapshot:
    """One rank's parts of the pseudo-gradient of a round's fragment: global params minus local
    params, fp32.

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
    expert_tokens: int = 0
    """Tokens trained on since the fragment's experts were last averaged, if the round sends
    them.
    """
    expert_counts: Sequence[int] = ()
    """How often these tokens chose each of the fragment's groups of experts, as the island claims
    it.
    """
    counted: Mapping[ExpertGroup, int] = field(default_factory=dict)
    """The counts of the routers from which these claims follow, over all ranks."""


class Contribution:
    """Thread-safe slot for one rank's snapshot, which the training thread fills while a round is
    being prepared.

    A snapshot counts for its own round only. Without a snapshot the island observes the round. The
    slot also has the state to which the island would go back instead, together with others; this
    offer stands until it is withdrawn.
    """

    def __init__(
        self, snapshot: Snapshot | None = None, earlier: EarlierState | None = None
    ) -> None:
        """Create the slot with a snapshot, or None, and an offer to go back to `earlier`, or
        None.
        """
        self._snapshot = snapshot
        self._earlier = earlier
        self._is_offered = earlier is not None
        self._changed = threading.Condition()

    def put(self, snapshot: Snapshot) -> None:
        """Contribute this snapshot to its round from now on."""
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def offer(self, earlier: EarlierState) -> None:
        """Offer to go back to this state from now on."""
        with self._changed:
            self._earlier = earlier
            self._is_offered = True
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Offer to go back no longer. A plan that has been made with the offer may still go
        back.
        """
        with self._changed:
            self._is_offered = False

    @property
    def offered(self) -> str | None:
        """The digest of the state to which this island offers to go back; None if it does not."""
        with self._changed:
            return self._earlier.digest if self._is_offered and self._earlier is not None else None

    def wait_for_earlier(self, digest: str, seconds: float) -> EarlierState | None:
        """Return the state with this digest, which the island's leader has already offered on its
        own rank. None if this rank does not have it within `seconds`.
        """

        def has_it() -> bool:
            return self._earlier is not None and self._earlier.digest == digest

        with self._changed:
            self._changed.wait_for(has_it, seconds)
            return self._earlier if has_it() else None

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
            raise OuterError(
                f"round {round_number}: this rank had no snapshot within {seconds:.0f} s"
            )
        return snapshot

    def _find(self, round_number: int) -> Snapshot | None:
        return (
            self._snapshot
            if self._snapshot is not None and self._snapshot.round == round_number
            else None
        )
