"""The interface between the outer loop and the ways in which islands average."""

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
    """Another island's state, which this island holds now."""

    base_digest: str | None
    """The donors' digest of the round that this island held before, or None if they do not know it."""
    contains_own: bool
    """Whether the last commit contains this island's own progress."""


class Averager(Protocol):
    """Turns this island's pseudo-gradient into a commit of its replica, together with other islands.

    `AgreedAverager` (agreed.py) commits one mean on all participants of a plan or on none; `GossipAverager`
    (outer/gossip/averager.py) averages with a few partners. Every rank of the island makes the same calls in the same
    order. The outer loop (outer/loop.py) uses it like this:

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
        """Where its messages are sent, and the clock of its waits."""
        ...

    @property
    def share(self) -> float:
        """This island's weight in the last mean, or an equal share before the first. A checkpoint sets it."""
        ...

    @share.setter
    def share(self, value: float) -> None: ...

    @property
    def memory(self) -> RoundMemory:
        """What this rank keeps from round to round besides the replica; checkpoints contain it."""
        ...

    def enter(self) -> bool:
        """Enter the run. True if the replica now holds another island's state, False if it goes on from its own.

        Raises InputError when the island must join a run and gets no state from it, OuterError when too few islands
        begin.
        """
        ...

    @property
    def proof(self) -> Proof:
        """Why other islands should believe that this island's state was committed. Empty except on the leader."""
        ...

    def resume(self, proof: Proof) -> None:
        """The replica holds the state of a checkpoint, which was saved with `proof`. Call it before `enter`."""
        ...

    def run(self, contribution: Contribution) -> list[RoundReport]:
        """Average and commit into the replica; reports of all attempts, the committed one last.

        The snapshot that the slot holds when a plan is made counts; while it is empty this island observes. Raises
        BehindError when others have committed without this island, whose state must then be taken; CaughtUp when it has
        been taken already; OuterError when the run cannot go on.
        """
        ...

    def take_state(self) -> TakenState | None:
        """Replace the replica by the state that survives. Call `announce` next, in any case.

        Returns None, and changes nothing, when no reachable island has a newer state.
        """
        ...

    def announce(self) -> None:
        """Tell the other islands that this one goes on from the state it holds now."""
        ...

    def interruption(self, seconds_left: float) -> Interruption:
        """Why inner steps should end before their planned end in `seconds_left`, or "". Leader only."""
        ...

    def linger(self) -> bool:
        """Wait, for a bounded time, until the others have this island's round. True if another history survives.

        Leader only.
        """
        ...

    def leave(self, steps: int) -> None:
        """Say goodbye, `steps` inner steps into the round. Does not wait for the others."""
        ...
