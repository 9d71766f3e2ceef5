"""Catch-up of an island that is behind: all its ranks take other islands' state together, each rank
its own parts.

Donors serve each part at the round in which it is when it is sent. The ranks bring all parts to one
common round, the donors confirm the digest of that state, and the island repeats this until it has
reached the donors' newest round.

If the donors remember the state that the island holds, the island starts from this state and needs
only the means since then. An island that has all parts and lacks only means reports that it is
coming, and the others wait for it as for an island that trains. Otherwise it would always be too
late for the next plan if a download takes about as long as a round.

Donors may die, and islands may claim states that they cannot provide. So before each try the island
checks again which islands are ahead of it, and continues from its own state when no island is.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outer.errors import MessageError, TransportError
from outer.network.event_loop import EventLoop
from outer.state.part_state import Position
from outer.state.replica import Replica
from outer.transfer.donor import Description
from outer.transfer.donor_choice import DonorChoice
from outer.transfer.download import Download

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
MAX_CHASES = 50
"""Maximum number of times that the donors may commit further rounds while this island catches
up.
"""


def is_ahead(replica: Replica, position: Position) -> bool:
    """Return whether a state at this position survives the replica's, or may survive it by its
    digest.
    """
    own = replica.position
    return (position.tokens, position.round) >= (own.tokens, own.round)


def believe_all(description: Description) -> None:
    """Accept every description. This is the default of `CatchUp.check`."""


def tell_nobody(is_coming: bool) -> None:
    """Do nothing. This is the default of `CatchUp.tell`."""


@dataclass(frozen=True)
class Failure:
    """The reason why a try failed. `is_wrong`: a state arrived that is not the one that the
    donors describe.
    """

    cause: str
    is_wrong: bool = False


@dataclass(frozen=True)
class NothingTaken:
    """No island that is ahead provides its state any more, so this island's own state survives."""

    causes: Sequence[str]
    """Reasons why the tries failed; empty if the donors were gone before the first try."""


@dataclass(frozen=True)
class CaughtUpState:
    """The state that this island has taken and now holds."""

    description: Description
    base_digest: str | None
    """The donors' digest of the round that this island held before, if that was the previous
    round."""


@dataclass(frozen=True)
class CatchUp:
    """Collective download of a state: all ranks of the island build it, and call `run` together."""

    replica: Replica
    build_download: Callable[[], Download]
    event_loop: EventLoop
    build_choice: Callable[[], DonorChoice]
    """Builds the choice of donors for one catch-up. Called on the leader."""
    is_ahead: Callable[[Position], bool]
    """Function that returns whether a state at this position survives the one that this island
    holds."""
    check: Callable[[Description], None] = believe_all
    """Function that raises MessageError for a description without proof. Called on the leader,
    on the event loop."""
    tell: Callable[[bool], None] = tell_nobody
    """Function called on all ranks with whether others may wait for this island, because it
    lacks only the means of some rounds."""

    def run(self) -> CaughtUpState | NothingTaken:
        """Take the newest global state of the islands that are ahead, and set local params to
        it, or change nothing.
        """
        choice = self.build_choice() if self.replica.ranks.is_leader else None
        download = self.build_download()
        held = self.replica.position.round
        causes = []
        while donors := self.replica.ranks.on_leader(lambda: choice.next() if choice else []):
            download.use_donors(donors)
            base, newest = self._ask_for_own(download, held)
            is_near = base == self.replica.digest and not causes
            if is_near:
                download.parts.update(self.replica.carried.states())
            self.tell(is_near)
            result = self._download_state(download, newest if is_near else 0)
            if isinstance(result, Description):
                self.replica.replace(download.parts, result.position)
                names = ", ".join(donor.island for donor in donors)
                log.info("took the state of round %d from %s", result.position.round, names)
                download.discard()
                if choice is not None:
                    choice.has_given()
                return CaughtUpState(result, base if held == result.position.round - 1 else None)
            log.warning("taking the state of other islands failed: %s", result.cause)
            causes.append(result.cause)
            if choice is not None:
                choice.has_failed(is_wrong=result.is_wrong)
            self.event_loop.sleep(PAUSE_SECONDS)
        return NothingTaken(list(dict.fromkeys(causes)))

    def _ask_for_own(self, download: Download, held: int) -> tuple[str | None, int]:
        """Return (the donors' digest of the round that this island holds, or None; their newest
        round).
        """
        if held == 0:
            return None, 0
        return self.replica.ranks.on_leader(
            lambda: self.event_loop.run(download.find_history(held))
        )

    def _download_state(self, download: Download, newest: int) -> Description | Failure:
        """Download the newest state on all ranks. Return its description, or the cause of the
        failure.

        `newest`: the donors' newest round, if the parts of an earlier one are here; otherwise 0.
        """
        result = None
        for _ in range(MAX_CHASES):
            target = self._reach_common_round(download, newest)
            if isinstance(target, Failure):
                return target
            digest = self.replica.combine(download.digests(), self.replica.ranks)
            result, newest = self.replica.ranks.on_leader(
                partial(self._verify, download, target, digest)
            )
            if isinstance(result, Failure):
                # Some part is damaged or belongs to another history, and it is not known which
                # part.
                download.discard()
                return result
            if newest <= target:
                break
        assert isinstance(result, Description), "a confirmed state has its description"
        return result

    def _reach_common_round(self, download: Download, target: int) -> int | Failure:
        """Bring all ranks' parts to one round, `target` or later. Return the round, or the cause
        of the failure.
        """
        for _ in range(MAX_CHASES):
            try:
                result = self.event_loop.run(
                    download.catch_up(target) if target else download.run(0)
                )
            except TransportError as error:
                result = str(error)
            results = self.replica.ranks.gather(result)
            if causes := [result for result in results if isinstance(result, str)]:
                return Failure(causes[0])
            newest = max(result for result in results if isinstance(result, int))
            if target and newest == target:
                return target
            self.tell(True)  # All parts are here, at different rounds.
            target = newest
        return Failure(f"the donors reached round {target} before this island had caught up")

    def _verify(
        self, download: Download, round_number: int, digest: str
    ) -> tuple[Description | Failure, int]:
        """Return (the donors' description of this state, their newest round), or (why it cannot
        be taken, 0).
        """
        try:
            description = self.event_loop.run(download.describe(round_number, digest, self.check))
            newest = self.event_loop.run(download.describe(None, check=self.check)).position.round
        except MessageError as error:
            return Failure(str(error), is_wrong=True), 0
        except TransportError as error:
            return Failure(str(error)), 0
        if not self.is_ahead(description.position):
            tokens = description.position.tokens
            return Failure(
                f"the state of round {round_number} with {tokens} tokens is not ahead of this "
                "island's"
            ), 0
        return description, newest
