"""What whoever trains hears of the island's rounds."""

from typing import Protocol

from diloco.runtime.progress import Progress
from outer.report import CaughtUp, Landing
from outer.rounds.quorum import CommittedRound


class RoundEvents(Protocol):
    """What happens around the rounds of one island. Every rank gets the same calls in the same order."""

    def begins(self, inner_step: int) -> None:
        """The inner steps of a round begin, after so many inner steps of the run."""

    def launches(self, progress: Progress) -> None:
        """A round is about to be launched with this progress."""

    def waits(self) -> None:
        """Training stands still until the round in flight has landed."""

    def landed(self, number: int, progress: Progress, landing: Landing) -> None:
        """A round has been committed with this progress of the island, and local params continue from it."""

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        """Others have committed without this island; it has taken their state."""

    def may_save(self, *, is_asked: bool) -> None:
        """No round is in flight: save now if that is asked for, or if the operator wants it."""

    def why_stop(self, num_rounds: int) -> str:
        """Why the island should leave after so many rounds of the run, or ""."""
        ...


class QuorumEvents(Protocol):
    """The same where rounds wait for a quorum only, and an island observes those to which it does not contribute."""

    def begins(self, inner_step: int) -> None:
        """An inner step begins, after so many inner steps of the run."""

    def launches(self, progress: Progress) -> None:
        """The island contributes this progress, and waits for the round."""

    def landed(self, committed: CommittedRound, made: Progress, cycle: int) -> None:
        """A round has landed, in this cycle of the run. `made` is the progress since the island last contributed."""

    def caught_up(self, caught: CaughtUp, progress: Progress) -> None:
        """Others have committed without this island; it has taken their state."""

    def contributed(self, num_rounds: int) -> str:
        """The island has contributed to the last of so many rounds, and no other is being prepared: save now, if that
        is due. Returns why the island should leave, or ""."""
        ...
