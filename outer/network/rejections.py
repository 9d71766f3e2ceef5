"""What peers sent and this rank refused: counted by peer and reason, told in the log, bounded in size."""

import logging
import threading

from outer.errors import MessageError

log = logging.getLogger(__name__)

MAX_ENTRIES = 512
"""Of (peer, kind). What more peers do is counted under OTHERS: names are free, so a stranger may use many."""
MAX_PEER_LENGTH = 160
MAX_TEXT_LENGTH = 400
OTHERS = "(others)"

Refusal = tuple[str, str, str, int]
"""Peer, kind, last text, how often."""


class RefusedError(MessageError):
    """A peer's bytes are refused before they mean anything. `kind` is the check that they fail, in one word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Refusals:
    """Counts refusals. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._new: dict[tuple[str, str], tuple[str, int]] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Of all peers and kinds, ever."""
        return self._total

    def add(self, peer: str, kind: str, text: str) -> None:
        """Count one refusal; the 1st, 10th, 100th ... of a kind and peer is logged."""
        peer, text = printable(peer, MAX_PEER_LENGTH), printable(text, MAX_TEXT_LENGTH)
        with self._lock:
            entry = (peer, kind)
            if entry not in self._counts and len(self._counts) >= MAX_ENTRIES:
                entry = (OTHERS, kind)
            count = self._counts[entry] = self._counts.get(entry, 0) + 1
            self._new[entry] = (text, self._new.get(entry, ("", 0))[1] + 1)
            self._total += 1
        if str(count).strip("0") == "1":
            log.warning("refused %s (%s, %d times so far): %s", peer, kind, count, text)

    def add_error(self, peer: str, error: MessageError) -> None:
        """Count what this error refuses."""
        self.add(peer, error.kind if isinstance(error, RefusedError) else "message", str(error))

    def counts(self) -> dict[str, int]:
        """How many of each kind, ever."""
        totals: dict[str, int] = {}
        with self._lock:
            for (_, kind), count in self._counts.items():
                totals[kind] = totals.get(kind, 0) + count
        return totals

    def drain(self) -> list[Refusal]:
        """Those since the last drain, one for each peer and kind."""
        with self._lock:
            new, self._new = self._new, {}
        return [(peer, kind, text, count) for (peer, kind), (text, count) in new.items()]


def printable(text: str, max_length: int) -> str:
    """A peer's text, fit for one line of a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:max_length])
