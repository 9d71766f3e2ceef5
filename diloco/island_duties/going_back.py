"""What an island does when its losses do not become finite: it offers the others to go back to an
earlier state.

More than half of the participants of a round must offer the same state (docs/protocol.md). Every
rank of the island makes the same calls.
"""

from diloco.assemble import Runtime
from inner.errors import TrainingStopped
from outer.state.earlier import EarlierState

MOST_OFFERS = 8
"""Most rounds in a row in which an island without a finite loss offers to go back. Then it ends."""
MOST_RETURNS = 3
"""Most times that an island goes back. After that, no earlier state will mend its losses."""


class GoingBack:
    """Counts an island's offers to go back, and its returns to an earlier state."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._num_offers = 0
        """Rounds since the last finite loss in which this island tried to go back."""
        self._num_returns = 0

    def is_well(self) -> bool:
        """Return whether the last loss was finite. If it was, the offers are counted from 0
        again.
        """
        is_well = self._runtime.trainer.broken_since is None
        if is_well:
            self._num_offers = 0
        return is_well

    def find_earlier(
        self, stopped: TrainingStopped, first_unproven: int | None
    ) -> EarlierState | None:
        """Return the state to go back to, because the losses do not become finite.

        None: the island must end. Checkpoints from inner step `first_unproven` on, which no finite
        loss has followed, are rejected; None: all are proved.
        """
        runtime = self._runtime
        if first_unproven is not None:
            self._reject_since(first_unproven)
        self._num_offers += 1
        if (
            runtime.checkpoints is None
            or self._num_offers > MOST_OFFERS
            or self._num_returns >= MOST_RETURNS
        ):
            return None
        earlier = runtime.checkpoints.find_earlier()
        if earlier is not None:
            runtime.event("offers to go back", f"to round {earlier.round}, because of {stopped}")
        return earlier

    def go_back(self, round_number: int) -> None:
        """Train on from the checkpoint of this round, to which all islands have gone back
        together.
        """
        runtime = self._runtime
        assert runtime.checkpoints is not None, (
            "only an island with a checkpoint offers to go back to it"
        )
        inner_step = runtime.trainer.inner_step
        runtime.checkpoints.reload_trainer()
        runtime.trainer.go_on_after_broken_steps(inner_step)
        runtime.outer.rewind()
        runtime.participation.count_moments()
        self._num_returns += 1
        runtime.event(
            "went back",
            f"to the state of round {round_number}; text read since then is not read again",
        )

    def _reject_since(self, inner_step: int) -> None:
        """Reject the checkpoints since the losses broke: the island then goes on from an earlier
        one.
        """
        runtime = self._runtime
        if runtime.checkpoints is None:
            return
        if names := runtime.checkpoints.reject_since(inner_step):
            since = runtime.trainer.broken_since
            text = f"{', '.join(names)}: no loss has been finite since inner step {since}"
            runtime.event("rejected", f"{text}; the island goes on from an earlier checkpoint")
