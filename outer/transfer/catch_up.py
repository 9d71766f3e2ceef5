"""An island takes the state of others: all its ranks together, each the parts it carries, to one round.

donors -> parts, each at the round at which it was given -> one round for all -> digest -> the newest round
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outer.donor import Description
from outer.errors import TransportError
from outer.island_state import IslandState
from outer.loop import LoopThread
from outer.membership.base import Member
from outer.team import Team
from outer.transfer import Fetch

log = logging.getLogger(__name__)

TRIES = 20
PAUSE_SECONDS = 0.5
MAX_CHASES = 50
"""Rounds that others may commit while this island catches up with the last ones."""

FindDonors = Callable[[], Sequence[Member]]
"""The islands that hold the history which survives; asked on the leader before each try."""


@dataclass(frozen=True)
class Taken:
    """A state that this island holds now."""

    description: Description
    base_digest: str | None
    """Of the state that this island held before, as the donors remember that round; None: they do not."""


class Taker:
    """Every rank of the island builds it and calls `take` together."""

    def __init__(
        self, held: IslandState, fetch: Callable[[], Fetch], team: Team, loop: LoopThread, find_donors: FindDonors
    ) -> None:
        self._held, self._fetch, self._team, self._loop, self._find_donors = held, fetch, team, loop, find_donors

    def take(self) -> Taken:
        """Global state and local params become those of the donors' newest round.

        Raises TransportError, with all causes, when no island's state can be taken.
        """
        causes, fetch, before = [], self._fetch(), self._held.mine.position.round
        for _ in range(TRIES):
            donors = self._team.on_leader(lambda: list(self._find_donors()))
            fetch.use(donors)
            taken = _try(self._held, fetch, self._team, self._loop) if donors else "no island has a state to give"
            if isinstance(taken, Description):
                self._held.replace(fetch.parts, taken.position)
                names = ", ".join(donor.island for donor in donors)
                log.info("took the state of round %d from %s", taken.position.round, names)
                base = self._digest_of(fetch, before) if 0 < before == taken.position.round - 1 else None
                fetch.forget()
                return Taken(taken, base)
            log.warning("taking the state of others failed: %s", taken)
            causes.append(taken)
            time.sleep(PAUSE_SECONDS)
        raise TransportError("the state of no island could be taken: " + "; ".join(dict.fromkeys(causes)))

    def _digest_of(self, fetch: Fetch, round_number: int) -> str | None:
        def ask() -> str | None:
            try:
                return self._loop.run(fetch.describe(round_number)).digest
            except TransportError:
                return None

        return self._team.on_leader(ask)


def _try(held: IslandState, fetch: Fetch, team: Team, loop: LoopThread) -> Description | str:
    """The description of the state that is in `fetch.parts` on all ranks now, or why there is none."""
    newest, taken = 0, None
    for _ in range(MAX_CHASES):
        target = _to_one_round(fetch, team, loop, newest)
        if isinstance(target, str):
            return target
        digest = held.combine(fetch.digests(), team)
        taken, newest = team.on_leader(partial(_confirm, fetch, loop, target, digest))
        if isinstance(taken, str):
            # Some part is of another history or was damaged; nobody knows which one.
            fetch.forget()
            return taken
        if newest <= target:
            break
    assert isinstance(taken, Description), "a confirmed state has its description"
    return taken


def _to_one_round(fetch: Fetch, team: Team, loop: LoopThread, target: int) -> int | str:
    """The round that every rank's parts are at, at least `target`; or a rank's cause."""
    while True:
        reached, cause = target, None
        try:
            reached = loop.run(fetch.catch_up(target) if target else fetch.run(0))
        except TransportError as error:
            cause = str(error)
        results = team.gather((reached, cause))
        if failed := [cause for _, cause in results if cause is not None]:
            return failed[0]
        rounds = [reached for reached, _ in results]
        if target and max(rounds) == target:
            return target
        target = max(rounds)


def _confirm(fetch: Fetch, loop: LoopThread, round_number: int, digest: str) -> tuple[Description | str, int]:
    """(the donors' description of this state, their newest round), or (why they do not know it, 0)."""
    try:
        description = loop.run(fetch.check(round_number, digest))
        return description, loop.run(fetch.describe(None)).position.round
    except TransportError as error:
        return str(error), 0
