"""Rules for which islands may take part: `island.allow`, and the files in which an operator bans
islands during a run.
"""

import logging
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outer.identity.island_key import PUBLIC_KEY

log = logging.getLogger(__name__)

BANNED_FILE = "banned"
"""Name of the file in the island's or the run's folder. Each line has an island's name, key or
libp2p peer id; # begins a comment."""
REREAD_SECONDS = 1.0
MAX_FILE_BYTES = 1 << 20


@dataclass
class Access:
    """Decides which islands may take part, by name, key and peer id. Its methods may be called
    on any thread.
    """

    allow: Collection[str] = frozenset()
    """Islands' public keys and libp2p peer ids. If it is empty, all islands are allowed."""
    files: Sequence[Path] = ()
    """Files of banned islands. They are read again within REREAD_SECONDS of a change, and need
    not exist."""
    _banned: frozenset[str] = frozenset()
    _seen: list[tuple[int, int]] = field(default_factory=list)
    _looked_at: float = float("-inf")

    def ban(self, island: str, key: str, peer_id: str = "") -> str:
        """Return a text that describes the ban of this island, or "" if it is not banned."""
        banned = self.banned()
        hit = next((word for word in (island, key, peer_id) if word and word in banned), "")
        return (
            hit and f"{island} is banned here: the file {BANNED_FILE!r} of this island names {hit}"
        )

    def is_allowed(self, key: str, peer_id: str = "") -> bool:
        """Return whether `allow` permits the island with this key, which connects from this
        libp2p peer.
        """
        return not self.allow or key in self.allow or peer_id in self.allow

    @property
    def peer_ids(self) -> list[str]:
        """The entries of `allow` that are not islands' keys."""
        return [word for word in self.allow if not _is_key(word)]

    def may_connect(self, peer_id: str) -> bool:
        """Return whether a libp2p peer may open a stream at all. Its island's key is known only
        after the handshake.
        """
        if peer_id in self.banned():
            return False
        return not self.allow or peer_id in self.allow or len(self.peer_ids) < len(self.allow)

    def banned(self) -> frozenset[str]:
        """Return the names, keys and peer ids in the files, as they were last read."""
        if self.files and time.monotonic() - self._looked_at >= REREAD_SECONDS:
            self._looked_at = time.monotonic()
            seen = [_stamp(path) for path in self.files]
            if seen != self._seen:
                self._reread(seen)
        return self._banned

    def _reread(self, seen: list[tuple[int, int]]) -> None:
        found: set[str] = set()
        for path, (_, size) in zip(self.files, seen, strict=True):
            if size > MAX_FILE_BYTES:
                log.warning(
                    "%s is ignored: it has %d bytes, at most %d are allowed",
                    path,
                    size,
                    MAX_FILE_BYTES,
                )
            found |= _read_words(path) if 0 <= size <= MAX_FILE_BYTES else set()
        for word in sorted(found - self._banned):
            log.warning("%s is banned: this island refuses it from now on", word)
        for word in sorted(self._banned - found):
            log.warning("%s is no longer banned", word)
        self._banned = frozenset(found)
        self._seen = seen


def _is_key(word: str) -> bool:
    return re.fullmatch(PUBLIC_KEY, word) is not None


def _stamp(path: Path) -> tuple[int, int]:
    """Return the time of the last change and the size of a file, which differ after a change;
    the size is -1 if there is no file.
    """
    try:
        status = path.stat()
    except OSError:
        return 0, -1
    return status.st_mtime_ns, status.st_size


def _read_words(path: Path) -> set[str]:
    """Return the first word of each line, without comments. A file that cannot be read bans no
    island, and is logged.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        log.warning("the file of banned islands cannot be read: %s", error)
        return set()
    return {words[0] for line in lines if (words := line.partition("#")[0].split())}
