"""The interface between the outer loop and the two ways of averaging: agreed rounds and gossip."""

from dataclasses import dataclass
from typing import Protocol

from outer.agreement.proofs.certificate import Proof
from outer.agreement.running.driver import Interruption
from outer.hooks import Hooks
from outer.network.event_loop import EventLoop
from outer.report import RoundReport
from outer.rounds.checkpoint import RoundMemory
from outer.state.pseudo_gradient import Contribution


@dataclass(frozen=True)
class TakenState:
    """A state taken from another island, which this island now holds."""

    base_digest: str | None
    """The donors' digest of the round that this island held before, or None if they do not know
    this digest."""
    contains_own: bool
    """Whether the last commit contains this island's own progress."""


class Averager(Protocol):
    """Turns this island's pseudo-gradient into a commit of its replica, together with other
    islands.

    `AgreedAverager` (agreed.py) commits one mean on all participants of a plan or on none;
    `GossipAverager` (outer/gossip/averager.py) averages with a few partners. Every rank of the
    island makes the same calls in the same order. The outer loop (outer/loop.py) uses it like this:

        averager.enter()                                    once
        reports = averager.run(Contribution(snapshot))      every round, in a background thread
        averager.linger(); averager.leave(0)                at the end
    """

    @property
    def hooks(self) -> Hooks:
        """Hooks at the named phases of a round, for fault injection."""
        ...

    @property
    def event_loop(self) -> EventLoop:
        """The event loop that sends the averager's messages; its clock is the clock of all
        waits.
        """
        ...

    @property
    def share(self) -> float:
        """This island's weight in the last mean, or an equal share before the first. Set when a
        checkpoint is loaded.
        """
        ...

    @share.setter
    def share(self, value: float) -> None: ...

    @property
    def memory(self) -> RoundMemory:
        """The data that this rank keeps from round to round besides the replica. Checkpoints
        contain it.
        """
        ...

    def enter(self) -> bool:
        """Enter the run. Return True if the replica now holds another island's state, False if it
        still holds its own.

        Raises InputError when the island must join a run and gets no state from it, OuterError when
        too few islands begin.
        """
        ...

    @property
    def proof(self) -> Proof:
        """The proof that this island's state was committed. Empty except on the leader."""
        ...

    def resume(self, proof: Proof) -> None:
        """Record that the replica holds the state of a checkpoint, which was saved with `proof`.
        Call it before `enter`.
        """
        ...

    def run(self, contribution: Contribution) -> list[RoundReport]:
        """Average and commit into the replica. Return the reports of all attempts, the committed
        one last.

        The snapshot that the contribution holds when a plan is made counts; while it is empty this
        island observes. Raises BehindError when others have committed without this island, whose
        state must then be taken; CaughtUp when it has been taken already; OuterError when the run
        cannot continue.
        """
        ...

    def take_state(self) -> TakenState | None:
        """Replace the replica with the state that survives. In any case, call `announce` next.

        Returns None, and changes nothing, when no reachable island has a newer state.
        """
        ...

    def announce(self) -> None:
        """Announce to the other islands that this one continues from the state it holds now."""
        ...

    def interruption(self, seconds_left: float) -> Interruption:
        """Return why inner steps should end before their planned end in `seconds_left`, or "".
        Leader only.
        """
        ...

    def linger(self) -> bool:
        """Wait, for a limited time, until the others have this island's round. Return True if
        another history survives.

        Leader only.
        """
        ...

    def leave(self, steps: int) -> None:
        """Send a goodbye, `steps` inner steps into the round. Does not wait for other islands."""
        ...
