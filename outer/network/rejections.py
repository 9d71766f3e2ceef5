"""Rejections that a rank counts by peer and reason, and limits on the memory that it holds for
its callers.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from outer.errors import MessageError
from outer.network.event_loop import ChangeSignal

log = logging.getLogger(__name__)

MAX_ENTRIES = 512
"""Limit for pairs (peer, kind). Further peers are counted under OTHERS, because a stranger may
use many names."""
MAX_PEER_LENGTH = 160
MAX_TEXT_LENGTH = 400
OTHERS = "(others)"

MAX_CONNECTIONS = 4096
MAX_CONNECTIONS_OF_PEER = 512
"""Limits for incoming connections: of all peers, and of one peer (one island at one host)."""
MAX_UNPROVEN = 512
MAX_UNPROVEN_OF_HOST = 128
"""Limits for connections that have not proved an identity yet: of all hosts, and of one host,
from which an island of many ranks may dial. Beyond them the oldest such connection is closed: a
handshake is short, and a stranger must not keep islands out."""
MAX_HELD_BYTES = 1 << 28
MAX_HELD_BYTES_OF_PEER = 1 << 25
"""Limits for the bodies of calls that are being read or answered. Beyond them a connection is not
read further.
"""
MAX_REPLIES = 1 << 28
MAX_REPLIES_OF_PEER = 1 << 26
"""Limits for the bytes of replies that have not been sent yet. Beyond them calls with long
replies wait."""
SHORT_BYTES = 1 << 16
"""Replies up to this size do not wait and are not counted."""
BODY_SECONDS = 120.0
"""Longest wait until the body of a call may be read, and also the longest time for it to arrive."""

MAX_MALFORMED = 3
SUSPENDED_SECONDS = 600.0
"""When the holder of a key has sent MAX_MALFORMED malformed messages within SUSPENDED_SECONDS,
it is refused for SUSPENDED_SECONDS."""

Rejection = tuple[str, str, str, int]  # peer, kind, last text, count


class RefusedError(MessageError):
    """A peer's bytes failed a check before they were used. `kind` names the check in one word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class MalformedError(RefusedError):
    """A peer's message is longer than its kind can be, or not of its kind. A healthy peer sends
    no such message.
    """

    def __init__(self, text: str) -> None:
        super().__init__("malformed", text)


class Suspensions:
    """Holders of keys that have sent malformed messages, so that their messages are not read for
    a while. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._seen: dict[str, list[float]] = {}
        """Times of the last malformed messages, by key, with the key of the latest message at
        the end."""

    def add(self, key: str) -> bool:
        """Record a malformed message of the key's holder. Return whether it is suspended now."""
        with self._lock:
            self._seen[key] = [*self._seen.pop(key, []), self._clock()][-MAX_MALFORMED:]
            if len(self._seen) > MAX_ENTRIES:
                del self._seen[next(iter(self._seen))]
        return self.seconds_left(key) > 0

    def seconds_left(self, key: str) -> float:
        """Return the seconds for which the holder of the key is still suspended; 0 if it is not."""
        if not self._seen:
            return 0.0
        with self._lock:
            seen = self._seen.get(key, [])
        if len(seen) < MAX_MALFORMED or seen[-1] - seen[0] > SUSPENDED_SECONDS:
            return 0.0
        return max(0.0, seen[-1] + SUSPENDED_SECONDS - self._clock())


class Rejections:
    """Counts rejections by peer and kind. Its methods may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._new: dict[tuple[str, str], tuple[str, int]] = {}
        self.total = 0

    def add(self, peer: str, kind: str, text: str) -> None:
        """Count one rejection, and log the 1st, 10th, 100th ... rejection of each peer and kind."""
        peer = printable(peer, MAX_PEER_LENGTH)
        text = printable(text, MAX_TEXT_LENGTH)
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
        """Return the rejections since the last call, one entry per peer and kind."""
        with self._lock:
            new = self._new
            self._new = {}
        return [(peer, kind, text, count) for (peer, kind), (text, count) in new.items()]


class Guests:
    """The incoming connections of a messenger, and the bytes that it holds for them. Used on one
    event loop.
    """

    def __init__(self) -> None:
        self._unproven: dict[
            Guest, Callable[[], None]
        ] = {}  # functions that close a connection, the oldest first
        self._of_host: Counter[str] = Counter()  # unproven connections by host
        self._proven: Counter[str] = Counter()  # connections by peer
        self.bodies = _Held(lambda: (MAX_HELD_BYTES, MAX_HELD_BYTES_OF_PEER))
        self.replies = _Held(lambda: (MAX_REPLIES, MAX_REPLIES_OF_PEER))

    def enter(self, host: str, end: Callable[[], None] = lambda: None) -> "Guest":
        """Count a new connection from a host. Raises RefusedError if too many islands are
        connected.

        `end` closes the connection. It is called if too many connections have not proved an
        identity, and this is the oldest of all or of its host.
        """
        if self._proven.total() >= MAX_CONNECTIONS:
            raise RefusedError("streams", f"more than {MAX_CONNECTIONS} connections")
        if self._of_host[host] >= MAX_UNPROVEN_OF_HOST:
            self._end_oldest(host)
        elif len(self._unproven) >= MAX_UNPROVEN:
            self._end_oldest(max(self._of_host, key=lambda other: self._of_host[other]))
        guest = Guest(self, host)
        self._unproven[guest] = end
        self._of_host[host] += 1
        return guest

    def _end_oldest(self, host: str) -> None:
        """Close the oldest of a host's connections that have not proved an identity."""
        oldest = next(guest for guest in self._unproven if guest.host == host)
        end = self._unproven[oldest]
        self._forget(oldest)
        end()

    def _move(self, guest: "Guest", peer: str) -> None:
        if self._proven[peer] >= MAX_CONNECTIONS_OF_PEER:
            raise RefusedError(
                "streams", f"more than {MAX_CONNECTIONS_OF_PEER} connections of {peer}"
            )
        self._forget(guest)
        self._proven[peer] += 1

    def _forget(self, guest: "Guest") -> None:
        if self._unproven.pop(guest, None) is not None:
            _take(self._of_host, guest.host, 1)

    def _leave(self, guest: "Guest", peer: str | None) -> None:
        if peer is None:
            self._forget(guest)
        else:
            _take(self._proven, peer, 1)


class Guest:
    """One incoming connection. `leave` ends it."""

    def __init__(self, guests: Guests, host: str) -> None:
        self._guests = guests
        self.host = host
        self._peer: str | None = None

    def prove(self, island: str) -> None:
        """Record that the connection belongs to this island, which has proved the run key if
        there is one. Raises RefusedError.
        """
        peer = f"{island} at {self.host}"
        self._guests._move(self, peer)
        self._peer = peer

    def leave(self) -> None:
        """Forget the connection. Memory for its bodies is released when their calls are
        answered.
        """
        self._guests._leave(self, self._peer)

    def next_body(self) -> "MemoryShare":
        """Return the share for the body of the next call on this connection, whose peer is
        proved.
        """
        assert self._peer is not None, "only a proven connection sends bodies"
        return MemoryShare(self._guests.bodies, self._peer)

    def next_reply(self) -> "MemoryShare":
        """Return the share for the reply to a call on this connection."""
        assert self._peer is not None, "only a proven connection is answered"
        return MemoryShare(self._guests.replies, self._peer)


class _Held:
    """Counts the bytes that are held for peers, with a limit for each peer and one for all
    together.
    """

    def __init__(self, limits: Callable[[], tuple[int, int]]) -> None:
        self._limits = limits
        self.by_peer: Counter[str] = Counter()
        self._released = ChangeSignal()

    async def hold(self, peer: str, num_bytes: int) -> None:
        """Wait until there is room. A body longer than a peer's limit waits until nothing else
        is held for the peer.
        """

        def fits() -> bool:
            of_all, of_peer = self._limits()
            has_room = self.by_peer[peer] + num_bytes <= of_peer or not self.by_peer[peer]
            return has_room and self.by_peer.total() + num_bytes <= of_all

        await self._released.wait_until(fits)
        self.by_peer[peer] += num_bytes

    def change(self, peer: str, num_bytes: int) -> None:
        """Change the number of bytes held for a peer, without waiting."""
        _take(self.by_peer, peer, -num_bytes)
        self._released.notify()


class MemoryShare:
    """The memory of one body or reply, counted from before it exists until it is released."""

    def __init__(self, held: _Held, peer: str) -> None:
        self._held = held
        self._peer = peer
        self._num_bytes = 0

    async def hold(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may be held for the peer, and count them. Raises
        TimeoutError.
        """
        async with asyncio.timeout(BODY_SECONDS):
            await self._held.hold(self._peer, num_bytes)
        self._num_bytes = num_bytes

    def correct(self, num_bytes: int) -> None:
        """Correct the counted size to `num_bytes`, the actual size."""
        if num_bytes != self._num_bytes:
            self._held.change(self._peer, num_bytes - self._num_bytes)
        self._num_bytes = num_bytes

    def release(self) -> None:
        """Release the memory. Idempotent."""
        self.correct(0)


def _take(counter: Counter[str], key: str, amount: int) -> None:
    """Subtract from a counter and remove keys whose count is 0, because a stranger may use many
    names.
    """
    counter[key] -= amount
    if counter[key] <= 0:
        del counter[key]


def printable(text: str, max_length: int) -> str:
    """Shorten a peer's text and make it safe for one line of a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:max_length])
