"""The owner of each island's name: the first key that used the name in the run.

The file `names.json` in the island's folder keeps the owners over restarts. Only the leader has the
file. The island's other ranks get the names of a plan's participants from the leader.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from outer.errors import InputError
from outer.identity.files import write_atomically
from outer.identity.island_key import PUBLIC_KEY

log = logging.getLogger(__name__)

NAMES_FILE = "names.json"
MAX_NAMES = 4096
"""Limit for the names that are remembered. Beyond it the name that was unused for the longest
time is forgotten."""
SAVE_SECONDS = 1.0
"""Shortest time between two writes of the file."""
GUEST = "guest-"
_GUEST_DIGITS = 24


@dataclass
class _Owner:
    key: str
    time: int = 0
    """Time in the owner's newest record, in milliseconds since 1970."""


class KnownNames:
    """Names and their owners' keys, ordered from the least to the most recently used. Any thread
    may call its methods.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the owners from the file at `path`, if there is one. Raises InputError when the
        file cannot be read.
        """
        self._path = path
        self._lock = threading.Lock()
        self._owners = _load(path) if path is not None and path.exists() else {}
        self._is_saved = True
        self._saved_at = 0.0

    def claim(self, island: str, key: str) -> str:
        """Record that the holder of `key` uses the name. Return why it must not use it, or "" if
        the name is its own.
        """
        if island.startswith(GUEST):
            return (
                ""
                if island == guest_name(key)
                else f"{island} is the name of a guest with another key"
            )
        with self._lock:
            owner = self._owners.pop(island, None)
            self._owners[island] = owner or _Owner(key)
            if owner is None:
                self._is_saved = False
            while len(self._owners) > MAX_NAMES:
                del self._owners[next(iter(self._owners))]
            self._save_if_due()
        if owner is not None and owner.key != key:
            return (
                f"the name {island!r} belongs to the key {owner.key[:16]}... in this run, and "
                f"this is {key[:16]}..."
            )
        return ""

    def key_of(self, island: str) -> str | None:
        """Return the key that owns the name; None if it is not known."""
        owner = self._owners.get(island)
        return owner.key if owner else None

    def knows_others(self, island: str) -> bool:
        """Return whether the file, or this process, knows the name of an island other than
        `island`.
        """
        return any(name != island for name in self._owners)

    def keys_of(self, islands: Collection[str]) -> dict[str, str]:
        """Return the keys that own these names, by island, as far as they are known."""
        return {island: owner.key for island in islands if (owner := self._owners.get(island))}

    def is_newest(self, island: str, time_ms: int, slack_ms: int = 0) -> bool:
        """Return whether no record has been seen that is newer by more than `slack_ms`. Call
        `claim` first.

        The highest time is remembered.
        """
        with self._lock:
            owner = self._owners.get(island)
            if owner is None or time_ms < owner.time - slack_ms:
                return False
            owner.time = max(owner.time, time_ms)
            return True

    def newest(self, island: str) -> int:
        """Return the time in the newest record of the island, in milliseconds; 0 if no record
        was seen.
        """
        owner = self._owners.get(island)
        return owner.time if owner else 0

    def adopt(self, keys: Mapping[str, str]) -> None:
        """Replace owners with those that the island's leader knows, because its knowledge takes
        precedence.
        """
        with self._lock:
            for island, key in keys.items():
                if self.key_of(island) != key:
                    self._owners[island] = _Owner(key)

    def save(self) -> None:
        """Write the file now, if there is a path. A failure is logged."""
        with self._lock:
            self._save()

    def _save_if_due(self) -> None:
        if not self._is_saved and time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        owners = {name: asdict(owner) for name, owner in self._owners.items()}
        try:
            write_atomically(self._path, json.dumps(owners, indent=0).encode())
        except OSError as error:
            log.warning("the names of the run's islands cannot be saved: %s", error)
        self._is_saved = True
        self._saved_at = time.monotonic()


def guest_name(key: str) -> str:
    """Return the name of a guest, such as a doctor, which is no island of the run. It is derived
    from the key, so no other can use it.
    """
    return f"{GUEST}{key[:_GUEST_DIGITS]}"


def _load(path: Path) -> dict[str, _Owner]:
    try:
        owners = {
            str(name): _Owner(str(o["key"]), int(o["time"]))
            for name, o in json.loads(path.read_text()).items()
        }
        if all(re.fullmatch(PUBLIC_KEY, owner.key) for owner in owners.values()):
            return owners
        raise ValueError("a key is not 64 hexadecimal digits")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: it does not hold the names and keys of the run's islands ({error}); remove "
            "it, and the names are learned anew"
        ) from None
