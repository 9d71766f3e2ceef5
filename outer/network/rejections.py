"""What a rank refuses: counters of rejections by peer and reason, and limits on what it holds for its callers."""

import asyncio
import logging
import threading
from collections import Counter

from outer.errors import MessageError
from outer.network.event_loop import ChangeSignal

log = logging.getLogger(__name__)

MAX_ENTRIES = 512
"""Limit for pairs (peer, kind). Further peers are counted under OTHERS, because a stranger may use many names."""
MAX_PEER_LENGTH = 160
MAX_TEXT_LENGTH = 400
OTHERS = "(others)"

MAX_CONNECTIONS, MAX_CONNECTIONS_OF_PEER = 4096, 512
"""Limits for incoming connections: of all peers, and of one, that is an island at one host."""
MAX_UNPROVEN, MAX_UNPROVEN_OF_HOST = 512, 128
"""Limits for connections that have not said who they are. An island of many ranks may dial from one host."""
MAX_HELD_BYTES, MAX_HELD_BYTES_OF_PEER = 1 << 28, 1 << 25
"""Limits for the bodies of calls that are being read or answered. Beyond them a connection is not read further."""
BODY_SECONDS = 120.0
"""Longest wait until the body of a call may be read, and then longest time for it to arrive."""

Rejection = tuple[str, str, str, int]  # peer, kind, last text, count


class RefusedError(MessageError):
    """A peer's bytes fail a check before they are used. `kind` names the check in one word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Rejections:
    """Counts rejections by peer and kind. Its methods may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._new: dict[tuple[str, str], tuple[str, int]] = {}
        self.total = 0

    def add(self, peer: str, kind: str, text: str) -> None:
        """Count one rejection, and log the 1st, 10th, 100th ... of each peer and kind."""
        peer, text = printable(peer, MAX_PEER_LENGTH), printable(text, MAX_TEXT_LENGTH)
        with self._lock:
            entry = (peer, kind)
            if entry not in self._counts and len(self._counts) >= MAX_ENTRIES:
                entry = (OTHERS, kind)
            count = self._counts[entry] = self._counts.get(entry, 0) + 1
            self._new[entry] = (text, self._new.get(entry, ("", 0))[1] + 1)
            self.total += 1
        if str(count).strip("0") == "1":
            log.warning("refused %s (%s, %d times so far): %s", peer, kind, count, text)

    def add_error(self, peer: str, error: MessageError) -> None:
        self.add(peer, error.kind if isinstance(error, RefusedError) else "message", str(error))

    def drain(self) -> list[Rejection]:
        """Return the rejections since the last call, one entry for each peer and kind."""
        with self._lock:
            new, self._new = self._new, {}
        return [(peer, kind, text, count) for (peer, kind), (text, count) in new.items()]


class Guests:
    """The incoming connections of a messenger, and the bytes that it holds for them. Lives on one event loop."""

    def __init__(self) -> None:
        self._unproven: Counter[str] = Counter()  # connections by host
        self._proven: Counter[str] = Counter()  # connections by peer
        self._held: Counter[str] = Counter()  # bytes by peer
        self._released = ChangeSignal()

    def enter(self, host: str) -> "Guest":
        """Count a new connection from a host. Raises RefusedError if there are too many."""
        unproven, of_host = self._unproven.total(), self._unproven[host]
        total = unproven + self._proven.total()
        if total >= MAX_CONNECTIONS or unproven >= MAX_UNPROVEN or of_host >= MAX_UNPROVEN_OF_HOST:
            text = f"of {total} connections {unproven} have not said who they are, {of_host} of them from this host"
            raise RefusedError("streams", text)
        self._unproven[host] += 1
        return Guest(self, host)

    def _move(self, host: str, peer: str) -> None:
        if self._proven[peer] >= MAX_CONNECTIONS_OF_PEER:
            raise RefusedError("streams", f"more than {MAX_CONNECTIONS_OF_PEER} connections of {peer}")
        _take(self._unproven, host, 1)
        self._proven[peer] += 1

    def _leave(self, host: str, peer: str | None) -> None:
        _take(self._unproven if peer is None else self._proven, host if peer is None else peer, 1)

    async def _hold(self, peer: str, num_bytes: int) -> None:
        def fits() -> bool:
            has_room = self._held[peer] + num_bytes <= MAX_HELD_BYTES_OF_PEER or not self._held[peer]
            return has_room and self._held.total() + num_bytes <= MAX_HELD_BYTES

        await self._released.wait_until(fits)
        self._held[peer] += num_bytes

    def _release(self, peer: str, num_bytes: int) -> None:
        _take(self._held, peer, num_bytes)
        self._released.notify()


class Guest:
    """One incoming connection. `leave` ends it."""

    def __init__(self, guests: Guests, host: str) -> None:
        self._guests, self._host = guests, host
        self._peer: str | None = None

    def prove(self, island: str) -> None:
        """The connection is of this island, which has proved the run key if there is one. Raises RefusedError."""
        peer = f"{island} at {self._host}"
        self._guests._move(self._host, peer)
        self._peer = peer

    def leave(self) -> None:
        """Forget the connection. The bodies that it has sent are released when their calls are answered."""
        self._guests._leave(self._host, self._peer)

    def next_body(self) -> "Body":
        """The body of the next call on this connection, which has proved whose it is."""
        assert self._peer is not None, "only a proven connection sends bodies"
        return Body(self._guests, self._peer)


class Body:
    """The body of one call, from the frame's header until the call is answered."""

    def __init__(self, guests: Guests, peer: str) -> None:
        self._guests, self._peer, self._num_bytes = guests, peer, 0

    async def hold(self, num_bytes: int) -> None:
        """Wait until the peer may send a body of this size, and count it. Raises TimeoutError."""
        async with asyncio.timeout(BODY_SECONDS):
            await self._guests._hold(self._peer, num_bytes)
        self._num_bytes = num_bytes

    def release(self) -> None:
        """The body is gone. Idempotent."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._guests._release(self._peer, num_bytes)


def _take(counter: Counter[str], key: str, amount: int) -> None:
    """Subtract from a counter, which keeps no keys of nothing: a stranger may use many names."""
    counter[key] -= amount
    if counter[key] <= 0:
        del counter[key]


def printable(text: str, max_length: int) -> str:
    """Shorten a peer's text and make it safe for one line of a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:max_length])
