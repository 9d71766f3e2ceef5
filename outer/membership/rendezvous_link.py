"""An island's view of one of its rendezvous: its address, whether it answers, and the records that
it has sent.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from outer.config import NETWORKS
from outer.errors import InputError, TransportError, first_line
from outer.membership.base import Member
from outer.membership.records import Records

log = logging.getLogger(__name__)

SCHEME = "tcp://"


class RendezvousLink:
    """State of the connection to one rendezvous, and the records from it."""

    def __init__(self, address: str, grace_seconds: float) -> None:
        self.address = address
        self.target = address.removeprefix(SCHEME)
        self.wake = asyncio.Event()
        self.was_asked = self.has_answered = self.is_up = False
        self.cause = "no answer"
        self.is_announced = False
        """Whether this incarnation has announced itself to the rendezvous."""
        self.version = 0
        self.server = ""
        """Number of the last change that is known here, and the id of the server process that
        sent it."""
        self._members: dict[str, Member] = {}
        self._previous: dict[str, Member] = {}
        """Records from before a loss. They count until `_trusted_from`, because a rendezvous may
        return with fewer islands."""
        self._trusted_from = 0.0
        self._grace_seconds = grace_seconds

    def known(self) -> dict[str, Member]:
        """Return the records that count now, by island."""
        if time.monotonic() >= self._trusted_from:
            return self._members
        return self._previous | self._members

    def forget(self, island: str) -> None:
        """Forget an island's record until the rendezvous sends it again."""
        self._previous.pop(island, None)
        self._members.pop(island, None)

    def on_answer(self, records: Records, members: Mapping[str, Member]) -> None:
        """Record a reply and the members in its records that count.

        It may be the first reply after a loss, and may come from another process than the last one.
        """
        was_lost = self.has_answered and not self.is_up
        if was_lost:
            log.info("the rendezvous %s answers again", self.address)
        if was_lost or self.server not in ("", records.server):
            self._previous = self.known()
            self._trusted_from = time.monotonic() + self._grace_seconds
            self.wake.set()
        self.has_answered = True
        self.is_up = True
        self.server = records.server
        changed = {*self._members} if records.is_whole else {*records.records, *records.gone}
        kept = {name: member for name, member in self._members.items() if name not in changed}
        self._members = kept | dict(members)
        self.version = records.version

    def on_lost(self, error: TransportError) -> None:
        self.cause = first_line(error)
        if self.is_up:
            log.warning(
                "the rendezvous %s is lost (%s); training continues without it",
                self.address,
                self.cause,
            )
        self.is_up = False
        self.version = 0


def is_of_dht(addresses: Sequence[str]) -> bool:
    """Return whether there are addresses, and all of them are libp2p multiaddresses."""
    return bool(addresses) and all(address.startswith("/") for address in addresses)


def check_rendezvous_addresses(transport: str, addresses: Sequence[str]) -> None:
    """Raise InputError unless there are addresses, and all of them are addresses of a
    rendezvous.
    """
    if not addresses:
        or_dht = ""
        if NETWORKS[transport].may_meet_in_dht:
            or_dht = ", or addresses of a DHT, as `diloco bootstrap` prints them"
        raise InputError(
            f"island.bootstrap: got no address; outer.transport {transport} needs tcp://HOST:PORT, "
            f"as `diloco bootstrap --rendezvous tcp` prints it{or_dht}. With several addresses the "
            "run survives the loss of a rendezvous"
        )
    for address in addresses:
        parse_rendezvous_address(address)


def parse_rendezvous_address(address: str) -> tuple[str, int]:
    """Split `tcp://host:port` into host and port. Raises InputError."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    if (
        not address.startswith(SCHEME)
        or not host
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise InputError(
            f"island.bootstrap: got {address!r}; with outer.transport gloo or tls it is "
            "tcp://HOST:PORT, as `diloco bootstrap --rendezvous tcp` prints it; with tls all may "
            "be those of a DHT instead"
        )
    return host.strip("[]"), int(port)
