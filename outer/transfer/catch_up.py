"""How an island that is behind takes the state of others: all its ranks together, each rank the parts it carries.

Donors serve each part at the round in which they are when it leaves. The ranks bring all parts to one common round, the
donors confirm the digest of that state, and the island repeats this until it has reached the donors' newest round.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outer.errors import TransportError
from outer.membership.base import Member
from outer.network.event_loop import EventLoopThread
from outer.state.replica import Replica
from outer.transfer.donor import Description
from outer.transfer.download import Download

log = logging.getLogger(__name__)

TRIES = 20
PAUSE_SECONDS = 0.5
MAX_CHASES = 50
"""Maximum number of times that the donors may commit further rounds while this island catches up."""


@dataclass(frozen=True)
class CaughtUpState:
    """The state that this island has taken and now holds."""

    description: Description
    base_digest: str | None
    """Digest that the donors remember for the round this island held before, if that was the previous round."""


@dataclass(frozen=True)
class CatchUp:
    """Collective download of a state: all ranks of the island build it, and call `run` together."""

    replica: Replica
    build_download: Callable[[], Download]
    event_loop: EventLoopThread
    find_donors: Callable[[], Sequence[Member]]
    """Finds the islands that hold the surviving history. Called on the leader before each attempt."""

    def run(self) -> CaughtUpState:
        """Take the donors' newest global state and local params. Raises TransportError with all causes of failure."""
        causes, download, before = [], self.build_download(), self.replica.position.round
        for _ in range(TRIES):
            donors = self.replica.ranks.on_leader(lambda: list(self.find_donors()))
            download.use_donors(donors)
            result = self._download_state(download) if donors else "no island has a state to give"
            if isinstance(result, Description):
                self.replica.replace(download.parts, result.position)
                names = ", ".join(donor.island for donor in donors)
                log.info("took the state of round %d from %s", result.position.round, names)
                base = self._find_base(download, before) if 0 < before == result.position.round - 1 else None
                download.discard()
                return CaughtUpState(result, base)
            log.warning("taking the state of other islands failed: %s", result)
            causes.append(result)
            time.sleep(PAUSE_SECONDS)
        raise TransportError("the state of no island could be taken: " + "; ".join(dict.fromkeys(causes)))

    def _download_state(self, download: Download) -> Description | str:
        """Download the newest state on all ranks. Returns its description, or the cause of the failure."""
        newest, result = 0, None
        for _ in range(MAX_CHASES):
            target = self._reach_common_round(download, newest)
            if isinstance(target, str):
                return target
            digest = self.replica.combine(download.digests(), self.replica.ranks)
            result, newest = self.replica.ranks.on_leader(partial(self._verify, download, target, digest))
            if isinstance(result, str):
                # Some part is damaged or belongs to another history, and it is not known which one.
                download.discard()
                return result
            if newest <= target:
                break
        assert isinstance(result, Description), "a confirmed state has its description"
        return result

    def _reach_common_round(self, download: Download, target: int) -> int | str:
        """Bring all ranks' parts to one round, `target` or later. Returns the round, or the cause of failure."""
        while True:
            try:
                result = self.event_loop.run(download.catch_up(target) if target else download.run(0))
            except TransportError as error:
                result = str(error)
            results = self.replica.ranks.gather(result)
            if causes := [result for result in results if isinstance(result, str)]:
                return causes[0]
            newest = max(result for result in results if isinstance(result, int))
            if target and newest == target:
                return target
            target = newest

    def _verify(self, download: Download, round_number: int, digest: str) -> tuple[Description | str, int]:
        """(the donors' description of this state, their newest round), or (why they do not confirm it, 0)."""
        try:
            description = self.event_loop.run(download.describe(round_number, digest))
            return description, self.event_loop.run(download.describe(None)).position.round
        except TransportError as error:
            return str(error), 0

    def _find_base(self, download: Download, round_number: int) -> str | None:
        """Digest of the round that this island held before, as the donors remember it. None if they do not."""
        return self.replica.ranks.on_leader(lambda: self.event_loop.run(download.find_digest(round_number)))
