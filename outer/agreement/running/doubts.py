"""Other islands' claims whose state could not be fetched: how long they are ignored, and which
islands are donors instead.

An island may claim to be ahead although no island can fetch its state: it lies, or its link is
broken. Such a claim must neither delay healthy islands nor make them download for ever.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Status
from outer.membership.base import Member
from outer.network.rejections import Rejections
from outer.network.retry import backoff

log = logging.getLogger(__name__)

FIRST_SECONDS = 4.0
"""How long an island's claims are ignored after the first failure. The time doubles with every
further failure."""
MAX_SECONDS = 256.0


@dataclass
class Doubts:
    """Keeps `Knowledge.doubted` up to date. All methods run on one event loop."""

    knowledge: Knowledge
    _failures: dict[str, int] = field(default_factory=dict)
    _ends: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def add(self, island: str, claim: Status) -> None:
        """Ignore this island's claim to be ahead for a while, because its state could not be
        taken.
        """
        failures = self._failures[island] = self._failures.get(island, 0) + 1
        seconds = backoff(failures, first_seconds=FIRST_SECONDS, max_seconds=MAX_SECONDS)
        self._cancel(island)
        self.knowledge.disbelieve(island, claim)
        self._ends[island] = asyncio.get_running_loop().call_later(
            seconds, self.knowledge.believe, island
        )
        claimed = f"round {claim.round} with {claim.tokens} tokens"
        log.warning(
            "%s claims to be in %s, but no island could send that state: its claim is ignored for "
            "%g s",
            island,
            claimed,
            seconds,
        )

    def find_donors(self, members: Mapping[str, Member]) -> list[Member]:
        """Return the records of the islands that hold the surviving history; empty if this island
        holds it.

        `members`: records by island. An island whose state cannot be fetched, because its addresses
        are not known, is ignored for a while, as by `add`.
        """
        knows = self.knowledge
        while behind := knows.behind(is_settled=True):
            if found := [members[name] for name in behind.donors if name in members]:
                return found
            for name in behind.donors:
                self.add(name, knows.statuses[name])
        if knows.status.round > 0:
            return []  # It has a state of its own, and records may be of dead islands.
        # The state of an island that has not sent its status yet is known from its record.
        silent = members.keys() - knows.doubted - knows.lost - knows.statuses.keys()
        ahead = [
            m
            for name, m in members.items()
            if name in silent and (m.tokens, m.round) > knows.status.rank
        ]
        best = max(((m.tokens, m.round) for m in ahead), default=None)
        return [m for m in ahead if (m.tokens, m.round) == best]

    def report_refused(self, rejections: Rejections) -> None:
        """Log and count the claims to be ahead that were refused for lack of proof."""
        refused = self.knowledge.claims.refused
        self.knowledge.claims.refused = []
        for island, why in refused:
            rejections.add(island, "proof", why)

    def clear(self, island: str) -> None:
        """Accept the island's claims again and forget its failures, because its state has been
        taken.
        """
        self._failures.pop(island, None)
        self._cancel(island)
        self.knowledge.believe(island)

    def _cancel(self, island: str) -> None:
        if end := self._ends.pop(island, None):
            end.cancel()
