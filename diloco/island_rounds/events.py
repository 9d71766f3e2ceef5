"""The events of an island's rounds, for the code that trains the island."""

from typing import Protocol

from diloco.runtime.progress import Progress
from outer.leases.ledger import Ledger
from outer.report import CaughtUp, Landing
from outer.rounds.quorum import CommittedRound


class RoundEvents(Protocol):
    """Callbacks around the rounds of one island. Every rank gets the same calls in the same
    order.
    """

    def begins(self, inner_step: int, ledger: Ledger) -> None:
        """Called when the inner steps of a round begin, after `inner_step` inner steps of the run.

        The borders in the data ledger determine the stage of the run.
        """

    def launches(self, progress: Progress) -> None:
        """Called before a round is launched with this progress."""

    def waits(self) -> None:
        """Called when training stops until the round in flight has landed."""

    def landed(self, number: int, progress: Progress, landing: Landing) -> None:
        """Called after a round with this progress is committed: local params continue from it."""

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        """Called after the island has taken the state of others, which had committed without it."""

    def may_save(self, *, is_asked: bool) -> None:
        """Called while no round is in flight: save if `is_asked`, or if the operator requests
        it.
        """

    def why_stop(self, num_rounds: int) -> str:
        """Return why the island should leave after `num_rounds` rounds of the run.

        Empty if it should not.
        """
        ...


class QuorumEvents(Protocol):
    """The same callbacks where rounds wait for a quorum only.

    The island observes the rounds to which it does not contribute.
    """

    def begins(self, inner_step: int, ledger: Ledger) -> None:
        """Called when an inner step begins, after `inner_step` inner steps of the run, with the
        data ledger of the last round that has landed.
        """

    def launches(self, progress: Progress) -> None:
        """Called when the island contributes this progress and waits for the round."""

    def landed(self, committed: CommittedRound, made: Progress, cycle: int) -> None:
        """Called after a round has landed, in this cycle of the run.

        `made` is the progress since the island last contributed.
        """

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        """Called after the island has taken the state of others, which had committed without it."""

    def may_save(self) -> None:
        """Called after a round that the island observed and that ends a cycle to be saved: save if
        due. No round is being prepared at that time.
        """

    def contributed(self, num_rounds: int) -> str:
        """Called after the island has contributed to the last of `num_rounds` rounds: save if due.

        No round is being prepared at that time. Return why the island should leave; empty if it
        should not.
        """
        ...
