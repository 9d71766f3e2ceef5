"""Compares this machine's clock with the clocks of other nodes of the DHT, in which records expire
by the clock.
"""

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import Any

from hivemind.dht import DHTNode
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import get_dht_time

from outer.errors import InputError

log = logging.getLogger(__name__)

WARN_SECONDS = 3.0
MAX_APART_SECONDS = 10.0
"""Largest difference of clocks that is accepted, in seconds. An island's record lives for 15 s
and is renewed every 4 s. A reader whose clock differs by more sees no records, or still sees all
islands that have left."""
ASK_SECONDS = 2.0


async def seconds_ahead(dht: DHTNode, peer: PeerID) -> float | None:
    """Return how many seconds this machine's clock is ahead of a peer's, up to the round-trip
    time; None if the peer does not answer.
    """
    kind: Any = dht_pb2.PingRequest  # pyright: ignore[reportAttributeAccessIssue] - made when it is imported
    request = kind(peer=dht.protocol.node_info, validate=False)
    asked = get_dht_time()
    try:
        async with asyncio.timeout(ASK_SECONDS):
            answer: Any = await dht.protocol.get_stub(peer).rpc_ping(request)
    except Exception:  # noqa: BLE001 - hivemind hands on whatever the peer's handler raised
        return None
    answered = get_dht_time()
    if answer.dht_time > answered:
        return answered - answer.dht_time
    return max(asked - answer.dht_time, 0.0)


async def require_equal_clocks(dht: DHTNode, peers: Iterable[PeerID]) -> None:
    """Raise InputError if the clocks of all peers that answer differ from this machine's by more
    than MAX_APART_SECONDS.
    """
    found = await asyncio.gather(*(seconds_ahead(dht, peer) for peer in peers))
    known = [ahead for ahead in found if ahead is not None]
    if known and (least := min(known, key=abs)) and abs(least) > MAX_APART_SECONDS:
        raise InputError(explain(least))


def explain(ahead: float) -> str:
    """Return what follows from clocks that differ, and the cure."""
    return (
        f"the clock of this machine is {describe(ahead)} that of the DHT's peer. Records in "
        "hivemind's DHT expire by the clock, so islands whose clocks are more than "
        f"{MAX_APART_SECONDS:g} s apart do not see each other: synchronise the clocks by NTP, for "
        "example with `timedatectl set-ntp true`"
    )


def describe(ahead: float) -> str:
    return f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'}"


class ClockWatch:
    """Warns when the clocks of this machine and a peer begin to differ. It warns again only
    after they were equal.
    """

    def __init__(self) -> None:
        self.trouble = ""
        """Description of the difference at the last comparison, or "" if the clocks were equal."""

    async def look(self, dht: DHTNode) -> None:
        """Compare the clock with the clock of one of the peers that this node knows."""
        peers = list(dht.protocol.routing_table.peer_id_to_uid)
        ahead = await seconds_ahead(dht, random.choice(peers)) if peers else None
        if ahead is None:
            return
        had_trouble = bool(self.trouble)
        self.trouble = explain(ahead) if abs(ahead) > WARN_SECONDS else ""
        if self.trouble and not had_trouble:
            log.warning("%s", self.trouble)
