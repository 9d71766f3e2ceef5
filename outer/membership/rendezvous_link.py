"""What an island knows of one of its rendezvous, and has from it."""

import asyncio
import logging
import time

from outer.errors import PeerLost, TransportError
from outer.membership.base import Member
from outer.membership.records import Records, parse_records

log = logging.getLogger(__name__)

SCHEME = "tcp://"


class Link:
    """One rendezvous: whether it answers, and what it has told."""

    def __init__(self, address: str, grace_seconds: float) -> None:
        self.address, self.target = address, address.removeprefix(SCHEME)
        self.answered, self.tried, self.wake = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_up = False
        self.cause = "no answer"
        self.has_place = False
        """Whether this incarnation has announced itself there."""
        self.digest = ""
        """Of the records that it has told."""
        self._server = ""
        """Which process that was."""
        self._members: dict[str, Member] = {}
        self._before: dict[str, Member] = {}
        """What was known when it was lost. Come back, it may know less, and is not believed at once."""
        self._believed_at = 0.0
        self._grace_seconds = grace_seconds

    def known(self) -> dict[str, Member]:
        """The records, by island."""
        if time.monotonic() >= self._believed_at:
            return self._members
        return self._before | self._members

    def forget(self, island: str) -> None:
        """Know an island's record no more until it is told again."""
        self._before.pop(island, None)
        self._members.pop(island, None)

    def on_answer(self, records: Records) -> None:
        """It has answered, for the first time or again; it may be another process than before."""
        was_lost = self.answered.is_set() and not self.is_up
        if was_lost:
            log.info("the rendezvous %s is back", self.address)
        if was_lost or self._server not in ("", records.server):
            self._before, self._believed_at = self.known(), time.monotonic() + self._grace_seconds
            self.wake.set()
        self.is_up, self._server = True, records.server
        self.answered.set()
        if records.records is not None:
            self._members, self.digest = parse_records(records.records), records.digest

    def on_lost(self, error: TransportError) -> None:
        """It has not answered."""
        self.cause = error.cause if isinstance(error, PeerLost) else str(error)
        if self.is_up:
            log.warning("the rendezvous %s is lost (%s); training goes on without it", self.address, self.cause)
        self.is_up, self.digest = False, ""
