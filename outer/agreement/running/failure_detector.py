"""Failure detection between islands: which islands are in the run, which of them live, and whether
this process froze.

Each second every island sends its status to others (a ping) and reads the membership records again.
With a coordinator (coordination.py), all islands ping it, and it pings the islands from which it
hears nothing. Each other island also pings one more island per second, in turn. Without a
coordinator all islands ping all. The exception is a large run whose islands train: no island waits
for another then, so each pings only some of the others, in turn. An island that does not answer a
call, or whose connection breaks twice, is lost until a message from it arrives.

A process that stood still (suspended, stopped, swapped out) must not blame others for calls that
failed during that time. It must also not commit an open plan before it has queried the outcome,
because the others may have aborted it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from outer.agreement.running.peers import Peers
from outer.agreement.state_machine import RoundProtocol
from outer.network.event_loop import BEAT_SECONDS, FreezeDetector, loop_time

log = logging.getLogger(__name__)

PING_SECONDS = 1.0
"""Interval between pings, and between repetitions of messages that may have been lost."""
SILENT_SECONDS = 2.0
"""The coordinator pings an island when this time has passed since the island's last message."""
MAX_TRAINING_PINGS = 16
"""The number of islands to ping at the start of a run, and per second while this island trains
without a coordinator."""


@dataclass
class FailureDetector:
    """Keeps the protocol's sets of present and lost islands up to date. All methods run on one
    event loop.
    """

    protocol: RoundProtocol
    peers: Peers
    send: Callable[[], None]
    """Sends the protocol's outbox."""
    on_lost: Callable[[str, str], None]
    """Called with an island that became lost and the cause."""
    on_removed: Callable[[], None]
    on_newly_lost: Callable[[str, str], None] = lambda island, cause: None
    """The same, but not again while the island stays lost."""
    woke_at: float = float("-inf")
    """End of this process's last freeze, in seconds on the event loop's clock."""
    losses: dict[str, str] = field(default_factory=dict)
    """Causes of the last losses, by island."""
    _heard_at: dict[str, float] = field(default_factory=dict)
    _turn: int = 0
    """Position in the sorted names from which `_next_in_turn` continues."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _freeze_detector: FreezeDetector = field(default_factory=FreezeDetector)

    async def start(self) -> None:
        """Find the members of the run, then start to ping them and to watch for freezes of this
        process.
        """
        self.peers.check_freeze = self.check_freeze
        await self.find_members()
        self._tasks = [
            asyncio.create_task(self._ping_forever()),
            asyncio.create_task(self._watch_for_freezes()),
        ]

    def stop(self) -> None:
        # This island is leaving, so an island that it no longer hears is not lost.
        self.on_newly_lost = lambda island, cause: None
        for task in self._tasks:
            task.cancel()

    async def find_members(self) -> None:
        """Read the membership records, add new islands, and remove those without a record that are
        lost or unknown.
        """
        if not await self.peers.refresh():
            return
        knowledge = self.protocol.knowledge
        for name in knowledge.present - frozenset(self.peers.members):
            # Without an address it can never be found out whether the island lives.
            if name in knowledge.lost or not self.peers.addresses(name):
                self.protocol.remove(name)
                self.peers.direct_addresses.pop(name, None)
                self.on_removed()
        knowledge.add(self.peers.members)
        self._heard_at = {
            name: at for name, at in self._heard_at.items() if name in knowledge.present
        }
        self.losses = {
            name: cause for name, cause in self.losses.items() if name in knowledge.present
        }

    def hear(self, island: str) -> None:
        """Record that a message of the island has arrived."""
        self._heard_at[island] = loop_time()

    def ping(self) -> None:
        """Queue this island's status for the islands that wait for it."""
        knowledge = self.protocol.knowledge
        self._queue(self.protocol.coordination.receivers(knowledge.present))

    def announce(self) -> None:
        """Queue this island's new status. No island waits for the first status of a run, so it
        goes to some islands, in turn.
        """
        status = self.protocol.knowledge.status
        coordinator = self.protocol.coordination.coordinator
        if status.round == 0 and status.is_coming and coordinator is None:
            self._queue(self._next_in_turn(MAX_TRAINING_PINGS))
        else:
            self.ping()

    def _queue(self, islands: Collection[str]) -> None:
        self.protocol.outbox += [(name, self.protocol.knowledge.status) for name in sorted(islands)]

    def _find_watched(self) -> frozenset[str]:
        """Return the islands to ping in this second, besides those that wait for this island's
        status.
        """
        present = self.protocol.knowledge.present
        coordination = self.protocol.coordination
        if coordination.coordinator is None or not present:
            return frozenset()
        if coordination.is_mine:
            since = loop_time() - SILENT_SECONDS
            return frozenset(name for name in present if self._heard_at.get(name, since) <= since)
        return self._next_in_turn(1)

    def _next_in_turn(self, count: int) -> frozenset[str]:
        names = sorted(self.protocol.knowledge.present)
        first = self._turn
        self._turn += count
        return frozenset(names[(first + i) % len(names)] for i in range(min(count, len(names))))

    def check_freeze(self) -> None:
        """Forbid a commit of the open plan on votes alone if this process has stood still since
        the last check.
        """
        if self._freeze_detector.was_frozen():
            self.woke_at = loop_time()
            self.peers.deadlines.num_freezes += 1
            self.protocol.require_query()

    def report_failure(self, island: str, cause: str, called_at: float) -> None:
        """Mark an island as lost after a failed call, unless this process froze during the call."""
        self.check_freeze()
        if called_at <= self.woke_at:
            return
        if island not in self.protocol.knowledge.lost:
            log.info("%s is lost: %s", island, cause)
            self.on_newly_lost(island, cause)
        self.protocol.mark_lost(island)
        self.losses[island] = cause
        self.on_lost(island, f"it is lost: {cause}")

    async def _ping_forever(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            await self.find_members()
            if self.protocol.state == "training" and self.protocol.coordination.coordinator is None:
                self._queue(self._next_in_turn(MAX_TRAINING_PINGS))
            elif (
                self.protocol.state != "gathering"
            ):  # In a gathering its ready message contains the status.
                self.ping()
            self._queue(self._find_watched())
            self.protocol.resend()
            self.send()

    async def _watch_for_freezes(self) -> None:
        while True:
            self.check_freeze()
            await asyncio.sleep(BEAT_SECONDS)
