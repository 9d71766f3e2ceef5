"""Counters for what peers sent and this rank rejected, by peer and reason. They are bounded in size and logged."""

import logging
import threading

from outer.errors import MessageError

log = logging.getLogger(__name__)

MAX_ENTRIES = 512
"""Limit for pairs (peer, kind). Further peers are counted under OTHERS, because a stranger may use many names."""
MAX_PEER_LENGTH = 160
MAX_TEXT_LENGTH = 400
OTHERS = "(others)"

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


def printable(text: str, max_length: int) -> str:
    """Shorten a peer's text and make it safe for one line of a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:max_length])
